"""HTTP routes, schemas and streaming of the OpenAI-compatible server; knows no tensors."""
