"""The KV cache in fewer bits: schemes, a cache that computes with them, calibration, and writing it down."""
