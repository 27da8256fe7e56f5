"""Training data: Megatron's token files (.bin/.idx) in, micro-batches of one rank out. Open loader.py first.

tokenize/ turns text into token files; other formats of text are added in tokenize/corpus.py. index_reader.py describes
the .idx file, which Megatron reads too. order.py, blend.py and dataset.py say which sample has which position: a
checkpoint holds only a number of consumed samples, so a change there changes the data of every resumed run.
"""
