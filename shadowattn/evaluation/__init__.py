"""How good it is: perplexity, and how faithful the attention."""
