"""Writers of training steps without torch: builders, DLRMs, sharded DLRMs, published programs, data parallelism."""
