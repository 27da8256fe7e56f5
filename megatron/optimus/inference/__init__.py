"""Runs trained models: generates text with a key/value cache, scores given text, and evaluates on tasks.

load.py        a checkpoint of any format and layout as a model on these ranks
cache.py       keys and values of the tokens so far, as the core attention of the model's own layers
sampling.py    from logits to the next token
text.py        from tokens to text: incomplete characters and stop strings
generate.py    the loop: prompts in batches, one token a step
score.py       log-probabilities of the tokens of given texts
prompts.py     prompts of the command line and of files
harness.py     a model behind lm-eval's interface
tasks.py       lm-eval's tasks: found, loaded and run; held_out.py makes tasks of a corpus
card.py        the numbers of an evaluation card; card_page.py: its HTML page
in_training.py the tasks of ``eval_tasks`` between two steps of a run
server/        an OpenAI-compatible server

The modules of a model are those of training (models/decoder.py); only their core attention is replaced. A new option of
the choice of tokens is a field of ``sampling.Sampling``. Must not change: a prompt's random numbers depend
on the seed and its number alone.
"""
