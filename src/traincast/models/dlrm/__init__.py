"""A DLRM on one GPU, written without torch."""
