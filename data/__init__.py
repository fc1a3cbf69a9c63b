"""Text in, batches out: corpus.py finds and reads documents, tokenizer.py and loader.py do the rest."""
