"""A closed list of authorities, and which authorities an answer cites from the list and outside it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from qat_lora.experiments.legal.citations import (
    CONNECTORS,
    COURTS,
    ENACTED,
    OPENINGS,
    Item,
    case_title,
    citations,
    content,
    entries,
    items,
    key,
    single_places,
    without_year,
    written,
)
from qat_lora.experiments.legal.sections import Answer

END = ""  # key in the tree of titles: a title ends here
LINKS = CONNECTORS | {"&", "for", "on", "or", "from", "application"}  # may occur in the name of a statute or a party
FAR = 30  # most items in a name, a report or a remark in brackets
APART = set("\n;:?!")  # characters that end a citation


class Authorities:
    """A closed list of citable authorities, found in texts in any spelling: two spellings with the same `citations.key`
    are one authority, named by its most frequent spelling.

    An authority is a title (an Act, Rules, a case), usually with a place in it or a report. names: one per authority.
    """

    def __init__(self, names: Iterable[str]):
        """names: citations or whole citation sections; an authority may occur any number of times."""
        spellings: dict[str, Counter] = defaultdict(Counter)
        for name in names:
            for own, spelled in citations(name).items():
                spellings[own][spelled] += 1
        self.listed = {own: found.most_common(1)[0][0] for own, found in spellings.items()}
        self.bare = self._only(case_title)
        self.undated = self._only(without_year)
        self.listed = {
            own: spelled for own, spelled in self.listed.items() if own not in self.bare and own not in self.undated
        }
        self.names = tuple(self.listed.values())
        self.titles: dict = {}
        self.several: dict[str, set[str]] = {}  # for an authority with several places: the key of each place
        for own, name in self.listed.items():
            found = items(name)
            self._plant(found)
            if apart := single_places(content(found), [item for item in found if item.places]):
                self.several[own] = set(map(key, apart))

    def _only(self, shortened: Callable) -> dict[str, str]:
        """Partly cited cases: the key of a case without its report, or without its year → the key of the only case in
        the list that matches."""
        cases = defaultdict(set)
        for own, spelled in self.listed.items():
            part = shortened(items(spelled))
            if part and key(part) != own:
                cases[key(part)].add(own)
        return {part: own for part, (own, *more) in cases.items() if not more}

    def _gathered(self, known: dict[str, str], others: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """The given authorities, with "s 5; s 6" merged into "ss 5 and 6" if that is in the list."""
        for own, parts in self.several.items():
            if parts <= known.keys() | others.keys():
                known, others = (
                    {part: name for part, name in found.items() if part not in parts} for found in (known, others)
                )
                known[own] = self.listed[own]
        return known, others

    def _plant(self, name: Sequence[Item]) -> None:
        """Add a title to the tree that finds titles in running text. A title without a number that is not a case is
        left out: it counts as a citation in a citation section, but as ordinary words elsewhere."""
        title = case_title(name)
        if not title and not any(sign.isdecimal() for item in name for sign in item.norm):
            return
        node = self.titles
        for item in title or content(name):
            node = node.setdefault(item.norm, {})
        node[END] = True

    def cited(self, answer: Answer) -> tuple[set[str], set[str]]:
        """(names in the list, other names) that an answer cites: every entry of its citation section and, in the other
        sections, everything that looks like a statute, a case or a place in a title of the list. In the other sections,
        a title of the list without a place or report does not count; in the citation section, a case may lack its
        report."""
        known, others = self.found(answer)
        return set(known.values()), set(others.values())

    def found(self, answer: Answer) -> tuple[dict[str, str], dict[str, str]]:
        """Like `cited`, but as {key: name}."""
        known, others = self.in_section(answer.sections.get("citation", ""))
        in_prose = _Reading(self, answer.prose)
        return self._gathered(in_prose.known | known, in_prose.others | others)

    def in_section(self, section: str) -> tuple[dict[str, str], dict[str, str]]:
        """({key: name} in the list, {key: name} of others) that the entries of a citation section cite."""
        known: dict[str, str] = {}
        others: dict[str, str] = {}
        for entry, groups in entries(section):
            for group in groups:
                own = key(group)
                own = self.bare.get(own) or self.undated.get(own, own)
                if own in self.listed:
                    known[own] = self.listed[own]
                    continue
                name = written(entry, group)
                reading = _Reading(self, name)
                rest = reading.rest()
                known |= reading.known
                if rest and not reading.known:
                    others[own] = name
                elif rest and not reading.others:
                    others[key(rest)] = " ".join(name[item.start : item.end] for item in rest)
                else:
                    others |= reading.others
        return self._gathered(known, others)


class _Reading:
    """The authorities that running text cites from a list and outside it. Visits every item a bounded number of
    times."""

    def __init__(self, authorities: Authorities, text: str):
        self.list, self.text, self.items = authorities, text, items(text)
        self.known: dict[str, str] = {}
        self.others: dict[str, str] = {}
        self.taken = bytearray(len(self.items))  # which items belong to a citation found so far
        at = 0
        while at < len(self.items):
            end = self._title_end(at)
            at = self._listed(at, end) if end else at + 1
        for find in (self._statute, self._case):
            for at in range(len(self.items)):
                if not self.taken[at]:
                    find(at)

    def rest(self) -> list[Item]:
        """The meaningful words outside citations and remarks in brackets."""
        found, depth = [], 0
        for at, (item, taken) in enumerate(zip(self.items, self.taken)):
            depth = max(0, depth + item.gap.count("(") - item.gap.count(")"))
            numbers_entry = not at and item.norm.isdecimal()  # as in "1. Limitation Act 1980, s 5"
            if not (taken or depth or numbers_entry or item.norm in OPENINGS):
                found.append(item)
        return found

    def _take(self, first: int, end: int, *ways: Sequence[Item]) -> None:
        """Record items first … end−1 as cited; each of `ways` is one authority; by default all items form one."""
        self.taken[first:end] = b"\1" * (end - first)
        name = None
        for way in ways or (self.items[first:end],):
            own = self.list.undated.get(key(way), key(way))
            if own in self.list.listed:
                self.known[own] = self.list.listed[own]
            elif own not in self.others:
                name = name or written(self.text, self.items[first:end])
                self.others[own] = name

    def _joined(self, at: int, apart: set[str] = APART) -> bool:
        """Whether item `at` can belong to the same citation as the one before it."""
        return 0 < at < len(self.items) and not apart & set(self.items[at].gap)

    # -- authorities in the list -------------------------------------------------------------------------------------
    def _title_end(self, at: int) -> int:
        """The end of the longest title of the list that begins at this item; 0 if there is none."""
        node, end, first = self.list.titles, 0, at
        while at < len(self.items) and (at == first or self._joined(at)):
            item = self.items[at]
            if item.norm != "the" or at == first:
                node = node.get(item.norm)
                if node is None:
                    break
                end = at + 1 if END in node else end
            at += 1
        return end

    def _listed(self, first: int, end: int) -> int:
        """Record a title of the list with its places or its report; returns where that citation ends."""
        if (with_places := self._places(first, end)) is not None:
            return with_places
        best = own = None
        for far in range(end, min(len(self.items), end + FAR // 2) + 1):
            if far > end and not self._joined(far - 1):
                break
            now = key(self.items[first:far])
            now = self.list.undated.get(now, now)
            if now != own and now in self.list.listed:
                best, own = far, now
        best = best or self._report(end)
        if best > end or own:
            self._take(first, best)
        else:
            self.taken[first:end] = b"\1" * (end - first)
        return best

    def _places(self, first: int, end: int) -> int | None:
        """Record a title with the places that follow it, or else those that precede it; returns where the citation
        ends, or None if there are no places."""
        far = self._chain(end, 1)
        near = first
        if far == end:
            while near and first - near < FAR and self._beside(near) and self.items[near - 1].norm in CONNECTORS:
                near -= 1
            opened, near = near, self._chain(near, -1)
            if near == opened:
                return None
        title, places = self.items[first:end], [*self.items[near:first], *self.items[end:far]]
        ways = [[*title, *(item for item in places if item.places)]]
        if key(ways[0]) not in self.list.listed:
            ways = single_places(title, places) or ways
        self._take(near, far, *ways)
        return far

    def _beside(self, at: int) -> bool:
        """Whether item `at` follows an uncited one with at most commas or brackets between them."""
        return at > 0 and not self.taken[at - 1] and set(self.items[at].gap) <= set(" ,()[]")

    def _chain(self, at: int, step: int) -> int:
        """The end of the chain of places, joined by commas and "and", that starts at `at`; step: 1 forwards, −1
        backwards."""
        end = at
        while 0 <= (place := at if step > 0 else at - 1) < len(self.items):
            item = self.items[place]
            if not self._beside(at) and not (step > 0 and set(item.gap) <= set(" ,()[]")):
                break
            if self.taken[place] or not (item.places or item.norm == "&"):
                break
            at += step
            end = at if item.places else end
        return end

    # -- other authorities, by their form ----------------------------------------------------------------------------
    def _statute(self, at: int) -> None:
        """Record an Act, Regulations, an Order or Rules with a name before and a year after it."""
        item, year = self.items[at], at + 1
        if not item.big or item.norm not in ENACTED:
            return
        if " ".join(word.norm for word in self.items[max(0, at - 2) : year]) in COURTS.values():
            self._places(at - 2, year)
            return
        if self._joined(year) and self.items[year].gap.strip() == "(":  # a remark in brackets, unless it is the year
            while (
                year < at + FAR and self._joined(year) and not self.items[year].year and ")" not in self.items[year].gap
            ):
                year += 1
        if not (self._joined(year) and self.items[year].year and set(self.items[year].gap) <= set(" ,()[]")):
            return
        first = self._names_before(at)
        if first < at and self._places(first, year + 1) is None:
            self._take(first, year + 1)

    def _case(self, at: int) -> None:
        """Record two parties with a v between them, with or without a report, or "Re" with a name and a report."""
        item, end = self.items[at], self._names_after(at + 1)
        if end == at + 1:
            return
        if item.norm == "v" and (first := self._names_before(at)) < at:
            self._take(first, self._report(end))
        elif item.norm == "re" and (item.big or (at and self.items[at - 1].norm == "in" and self.items[at - 1].big)):
            far = self._report(self._remark(end))
            if far > end:
                self._take(at, far)

    def _remark(self, first: int) -> int:
        """The end of a remark in brackets, such as "(A Child)", that begins at an item; `first` if there is none."""
        if not self._joined(first) or self.items[first].gap.strip() != "(" or self.items[first].year:
            return first
        ends = range(first + 1, min(first + FAR // 2, len(self.items)))
        return next((end for end in ends if ")" in self.items[end].gap), first)

    def _names_before(self, end: int) -> int:
        """The start of the name before an item: capitalised words, the words that link them, and remarks in
        brackets."""
        at, depth = end, 0
        while end - at < FAR and self._joined(at) and not self.taken[at - 1]:
            gap, before = self.items[at].gap, self.items[at - 1]
            depth += gap.count(")") - gap.count("(")
            if depth < 0 or (
                not depth and not (self._goes_on(before, self.items[at]) and (before.big or before.norm in LINKS))
            ):
                break
            at -= 1
        if depth > 0:
            return end
        if at and self.items[at - 1].norm == "v":  # a case, whose second party is not part of this name
            at = next((place for place in range(at, end) if self.items[place].norm == "&"), end)
        while at < end and (not self.items[at].big or self.items[at].norm in OPENINGS):
            at += 1
        return at

    def _names_after(self, first: int) -> int:
        """The end of the name that begins at an item."""
        at = end = first
        while at - first < FAR and self._joined(at, APART | set(",()[]")) and not self.taken[at]:
            item = self.items[at]
            if at > first and not self._goes_on(self.items[at - 1], item):
                break
            if not item.big and item.norm not in LINKS:
                break
            at += 1
            end = at if item.big else end
        return end

    def _goes_on(self, before: Item, after: Item) -> bool:
        """Whether a sentence continues from one item to the next: a full stop ends it, unless the first is an
        abbreviation or the next begins in lower case."""
        short = before.abbreviated or len(before.norm) == 1 or "." in self.text[before.start : before.end]
        return "." not in after.gap or short or not after.big

    def _report(self, first: int) -> int:
        """The end of the report that begins at an item: [1976] QB 286, or 410 U.S. 113 (1973)."""
        if not self._joined(first):
            return first
        item, end = self.items[first], first
        bracketed = item.gap.strip(" ,")[-1:] in ("(", "[") and item.year
        if not bracketed and not (item.norm[0].isdecimal() and set(item.gap) <= set(" .," if "," in item.gap else " ")):
            return first
        at, end = first + 1, first + bool(bracketed)
        while at < first + 8 and self._joined(at) and set(self.items[at].gap) <= set(" .,()]"):
            item = self.items[at]
            if not (item.big or item.norm == "&" or item.norm[0].isdecimal()):
                break
            at += 1
            end = at if item.norm[0].isdecimal() else end
        if end > first and not bracketed and self._joined(end) and self.items[end].gap.strip() in ("(", "["):
            far = next((far for far in range(end, min(end + 6, len(self.items))) if self.items[far].year), end - 1)
            end = far + 1
        return end
