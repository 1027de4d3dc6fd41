"""Storage: the encoding of keys, values and arrays; stores; the execution of plans; commit. No other layer does I/O."""
