"""From a configuration to a drafter and its corpus."""

from __future__ import annotations

from ssd.classic import ArticleCorpus, ArticleDrafter
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.drafter import SuffixDrafter
from ssd.stats import Stats


def new_corpus(config: DrafterConfig) -> Corpus | ArticleCorpus:
    """An empty corpus for drafters of this configuration. Raises ValueError for an impossible capacity."""
    if config.policy == "article":
        return ArticleCorpus(config.capacity)
    return Corpus(config.capacity, config.match_depth)


def new_drafter(
    config: DrafterConfig, *, corpus: Corpus | ArticleCorpus | None = None, stats: Stats | None = None
) -> SuffixDrafter | ArticleDrafter:
    """A drafter of this configuration. Raises ValueError for a corpus of another policy, or of another depth."""
    if config.policy == "article":
        if not isinstance(corpus, ArticleCorpus | None):
            raise ValueError("the corpus was made for policy='suffix'; make it with new_corpus(config)")
        return ArticleDrafter(config, corpus=corpus, stats=stats)
    if not isinstance(corpus, Corpus | None):
        raise ValueError("the corpus was made for policy='article'; make it with new_corpus(config)")
    return SuffixDrafter(config, corpus=corpus, stats=stats)
