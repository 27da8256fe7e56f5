"""Text from a trained model: generation with a key/value cache, and log-probabilities of given text.

load.py        a checkpoint of any format and layout as a model on these ranks
cache.py       keys and values of the tokens so far, as the core attention of the model's own layers
sampling.py    from logits to the next token
text.py        from tokens to text: incomplete characters and stop strings
generate.py    the loop: prompts in batches, one token a step
score.py       log-probabilities of the tokens of given texts
prompts.py     prompts of the command line and of files
harness.py     the model as lm-eval's harness asks it

The modules are those of training (models/decoder.py); only their core attention is replaced.
"""
