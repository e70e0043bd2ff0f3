"""Text in and out: tokenizers, chat templates, incremental detokenisation and stop strings."""
