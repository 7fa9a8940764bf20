"""Writers of training steps without torch: tapes, DLRMs, sharded DLRMs, published programs, data parallelism."""
