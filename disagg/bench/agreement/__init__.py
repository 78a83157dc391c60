"""`disagg bench agreement`: compares answers from quantized KV with those from unquantized KV."""
