"""Preprocessing: turns files of documents into token files (.bin/.idx). Open preprocess.py first.

corpus.py reads the formats of documents. The bytes written must not depend on the number of workers or processes, and
pretoken_cache.py must give the very ids that the tokenizer's library gives.
"""
