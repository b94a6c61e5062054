"""Checks of HTML pages without a browser."""

import re
from collections import Counter
from html.parser import HTMLParser

from drafter_service.observability.pages.page import POLICY

VOID = ("meta", "link")
"""Elements without an end tag."""


class _Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links, self.tags = [], [], Counter()

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.links += [value for name, value in attributes if name in ("src", "href", "style")]
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags_of(page):
    """Return the number of each element of a page, which must be balanced, load nothing and run no script."""
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.links == ["data:,"]
    assert POLICY in page
    assert not re.search(r"https?://|@import|url\(|<script|NaN|\binf\b", page)
    assert 'points=""' not in page
    return checker.tags
