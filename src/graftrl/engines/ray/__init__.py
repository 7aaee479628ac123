"""The engine of many processes: Ray places them, PyTorch's FSDP2 trains, vLLM samples. Nothing here is imported by a
run on the local engine, and neither ray nor vllm before a run on this one starts."""
