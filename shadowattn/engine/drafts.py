"""Drafted tokens: what followed the last few tokens where they came before (prompt lookup)."""

from collections.abc import Iterable

from shadowattn import checks


class PromptLookup:
    """Drafts up to `most` tokens: those behind the latest earlier place of the last `ngram` tokens, or of fewer where these are
    new."""

    def __init__(self, ngram: int = 3, most: int = 4):
        self.ngram = checks.integer("ngram", ngram, least=1)
        self.most = checks.integer("most", most, least=1)
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # where what followed these tokens last begins

    def add(self, tokens: Iterable[int]) -> None:
        """The text goes on with these tokens."""
        for token in tokens:
            end = len(self._tokens)
            for length in range(1, min(self.ngram, end) + 1):
                self._behind[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def draft(self) -> list[int]:
        """The tokens that may come next; none where not even the last token came before."""
        for length in range(min(self.ngram, len(self._tokens)), 0, -1):
            start = self._behind.get(tuple(self._tokens[-length:]))
            if start is not None:
                return self._tokens[start : start + self.most]
        return []
