"""What the gateway adds to a request, beside its peers: `python -m scripts.bench_gateway`."""
