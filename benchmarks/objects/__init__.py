"""What the benchmark of object stores needs: a server, a proxy with latency, and the ways that are compared."""
