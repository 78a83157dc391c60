"""The data path as a KV connector inside vLLM. Only `disagg.vllm.compat` imports vLLM, when vLLM loads the class."""
