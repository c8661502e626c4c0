"""Selected-token logprobs whose bits depend on nothing but the row's logits."""
