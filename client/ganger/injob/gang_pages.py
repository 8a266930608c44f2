"""All control pages of one gang, as a rank or its daemon sees them: local ones, and mirrors of remote ones."""

from __future__ import annotations

from collections.abc import Iterable

from ganger.injob.page import Page, PageError, Word, page_path
from ganger.protocol.stop_rules import RankPoint

__all__ = ["GangPages", "page_path"]


class GangPages:
    """The pages of a gang of ``world`` ranks in ``directory``, opened when first needed, read-only.

    Pages that are open already are handed in as ``known`` and stay their owner's to close. A page that is
    not there yet is looked for again at every call; one of another version raises PageMismatchError.
    """

    def __init__(self, directory: str, world: int, known: Iterable[Page] = ()) -> None:
        self._directory = directory
        self._world = world
        self._known = {page.get(Word.RANK): page for page in known}
        self._pages: dict[int, Page] = dict(self._known)

    def page(self, rank: int) -> Page | None:
        found = self._pages.get(rank)
        if found is None:
            try:
                found = Page.open(page_path(self._directory, rank), writable=False)
            except FileNotFoundError:
                return None
            if found.get(Word.RANK) != rank or found.get(Word.WORLD) != self._world:
                identity = found.identity()
                found.close()
                raise PageError(
                    f"{page_path(self._directory, rank)} belongs to rank {identity.rank} of {identity.world}, "
                    f"not to rank {rank} of {self._world}"
                )
            self._pages[rank] = found
        return found

    def points(self, agreement: int) -> tuple[RankPoint, ...] | None:
        """Return what every rank has published about an agreement, by rank; None while a page is missing."""
        points = []
        for rank in range(self._world):
            page = self.page(rank)
            if page is None:
                return None
            points.append(page.point(agreement))
        return tuple(points)

    def close(self) -> None:
        """Unmap all but the pages that were handed in."""
        for rank, page in self._pages.items():
            if rank not in self._known:
                page.close()
        self._pages.clear()
