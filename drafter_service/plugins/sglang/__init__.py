"""Drafts for SGLang: `--speculative-algorithm SSD`, with no change of SGLang.

SGLang finds `algorithm.register` through the entry point of this package. The algorithm is the host's NGRAM with other
drafts: its worker inherits the host's, and hands over exactly K nodes per request in each step. The first node is the
last committed token; the others are a path or, with `--speculative-eagle-topk` above 1, a tree. SGLang's modules are
imported inside functions, when it runs.
"""
