"""What the latency models of kernel profiles and of datasheets are made of."""
