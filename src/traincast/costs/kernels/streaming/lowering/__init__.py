"""Ops that become kernels which stream memory."""
