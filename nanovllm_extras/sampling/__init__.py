"""From logits to tokens: what requests add to logits and read of them, and tokens on their way to the host."""
