"""What `experiments.train_reference_model` is made of: corpus, tokenizer, initialisation, optimizer, checks, card."""
