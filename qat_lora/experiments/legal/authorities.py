"""A closed list of authorities, and which authorities an answer cites from the list and outside it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from qat_lora.experiments.legal.citations import (
    ADOPTED,
    CONNECTORS,
    ENACTED,
    OPENINGS,
    Citation,
    Known,
    case_title,
    content,
    entries,
    written,
)
from qat_lora.experiments.legal.items import COURTS, items
from qat_lora.experiments.legal.reports import Item
from qat_lora.experiments.legal.sections import Answer

END = ""  # key in the tree of titles: a title ends here
LINKS = CONNECTORS | {"&", "for", "on", "or", "from", "application"}  # may occur in the name of a statute or a party
ARTICLES = {"a", "an", "this", "that", "any", "such", "each", "no"}
STATES = {"uk", "eu", "us", "usa", "un", "ec", "eea"}  # initials that name no law
FAR = 30  # most items in a name, a report or a remark in brackets
APART = set("\n;:?!")  # characters that end a citation


class Authorities:
    """A closed list of citable authorities, found in texts in any spelling. An authority is a place in a law, a law, or
    a case with all its reports; it is named by its most frequent spelling.

    names: the spellings, each of one or more authorities.
    """

    def __init__(self, names: Iterable[str]):
        """names: citations or whole citation sections; an authority may occur any number of times."""
        groups = [(Citation.of(group), written(entry, group)) for name in names for entry, group in _groups(name)]
        self.known, self.titles = Known(), {}
        spelled: dict[str, Counter] = defaultdict(Counter)
        fullest: dict[str, tuple] = {}
        # the fullest first, so that shorter spellings are recognised and give no name
        for citation, name in sorted(groups, key=lambda group: _fullness(group[0]), reverse=True):
            if self.known.resolve(citation)[1]:
                self.known.add(citation)
                self._plant(items(name))
            for own in self.known.resolve(citation)[0]:
                if fullest.setdefault(own, _fullness(citation)) == _fullness(citation):
                    spelled[own][name] += 1
        self.listed = {own: names.most_common(1)[0][0] for own, names in spelled.items()}
        self.names = tuple(dict.fromkeys(self.listed.values()))

    def _plant(self, name: Sequence[Item]) -> None:
        """Add a title to the tree that finds titles in running text. A title without a number that is not a case is
        left out: it counts as a citation in a citation section, but as ordinary words elsewhere."""
        title = case_title(name)
        if not title and not any(sign.isdecimal() for item in name for sign in item.norm):
            return
        title = title or content(name)
        undated = [item for item in title if not item.year]
        for words in (title, undated if undated and undated[-1].norm in ENACTED and len(undated) > 1 else ()):
            node = self.titles
            for item in words:
                node = node.setdefault(item.norm, {})
            if words:
                node[END] = True

    def cited(self, answer: Answer) -> tuple[set[str], set[str]]:
        """(names in the list, other names) that an answer cites: every entry of its citation section and, in the other
        sections, everything that looks like a law, a case or a place in a title of the list. In the other sections, a
        title of the list without a place or report does not count; in the citation section, a case may lack its
        report."""
        known, others = self.found(answer)
        return {self.listed.get(own, own) for own in known}, set(others.values())

    def found(self, answer: Answer, known: Known | None = None) -> tuple[dict[str, str], dict[str, str]]:
        """Like `cited`, but as {key: name}. known: the list and what else counts as known; by default the list."""
        known = known or self.known
        mine, others = self.in_section(answer.sections.get("citation", ""), known)
        for citation, name in _Reading(self, answer.prose).found:
            _resolved(citation, name, known, mine, others)
        return mine, others

    def with_answer(self, answer: Answer) -> Known:
        """What the list and an answer know: the answer's own citations count as right."""
        known = Known(self.known)
        section = answer.sections.get("citation", "")
        for _, group in _groups(section):
            known.add(Citation.of(group))
        for citation, _ in [*_Reading(self, answer.prose).found, *self._section(section, known)]:
            if not citation.bare:
                known.add(citation)
        return known

    def in_section(self, section: str, known: Known | None = None) -> tuple[dict[str, str], dict[str, str]]:
        """({key: name} of known authorities, {key: name} of others) that the entries of a citation section cite."""
        mine: dict[str, str] = {}
        others: dict[str, str] = {}
        for citation, name in self._section(section, known or self.known):
            _resolved(citation, name, known or self.known, mine, others)
        return mine, others

    def _section(self, section: str, known: Known) -> Iterator[tuple[Citation, str]]:
        """The citations of a citation section. An entry is one citation if it is known, otherwise those found in it,
        with what is left over."""
        for entry, group in _groups(section):
            whole, name = Citation.of(group), written(entry, group)
            if known.resolve(whole)[0]:
                yield whole, name
                continue
            reading = _Reading(self, name)
            rest = reading.rest()
            real = [citation for citation, _ in reading.found if not citation.bare]
            mine = any(known.resolve(citation)[0] for citation in real)
            if not real or (rest and not mine):
                yield whole, name
                continue
            yield from reading.found
            if rest and not any(known.resolve(citation)[1] for citation in real):
                yield Citation.of(rest), " ".join(name[item.start : item.end] for item in rest)


def _groups(section: str) -> list[tuple[str, list[Item]]]:
    return [(entry, group) for entry, groups in entries(section) for group in groups]


def _fullness(citation: Citation) -> tuple:
    dated = (
        all(year for _, year in citation.reports) if citation.reports else bool(citation.years or not citation.title)
    )
    return len(citation.reports), dated, bool(citation.title), bool(citation.numbers)


def _resolved(citation: Citation, name: str, known: Known, mine: dict[str, str], others: dict[str, str]) -> None:
    """Enter a citation into the known authorities and the others. A bare title of the list counts only if it is itself
    an authority."""
    right, wrong = known.resolve(citation)
    if citation.bare:
        right, wrong = right.intersection(citation.keys()), ()
    mine |= dict.fromkeys(right, name)
    for key in wrong:
        others.setdefault(key, name)


class _Reading:
    """The authorities that running text cites from a list and outside it. Visits every item a bounded number of
    times."""

    def __init__(self, authorities: Authorities, text: str):
        self.list, self.text, self.items = authorities, text, items(text)
        self.found: list[tuple[Citation, str]] = []
        self.taken = bytearray(len(self.items))  # which items belong to a citation found so far
        at = 0
        while at < len(self.items):
            end = self._title_end(at)
            at = self._listed(at, end) if end else at + 1
        for find in (self._statute, self._case, self._code, self._number, self._acronym, self._signed):
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

    def _take(self, first: int, end: int, cited: Sequence[Item] | None = None, bare: bool = False) -> None:
        """Record items first … end−1 as one citation; cited: those of them that identify it, by default all; bare: a
        title of the list without a place or report."""
        self.taken[first:end] = b"\1" * (end - first)
        citation = Citation.of(cited or self.items[first:end])
        self.found.append((replace(citation, bare=bare), written(self.text, self.items[first:end])))

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
        far = self._numbered(end)
        if (with_places := self._places(first, far)) is not None:
            return with_places
        best = self._report(far)
        self._take(first, best, bare=best == end)
        return best

    def _numbered(self, at: int) -> int:
        """The end of the number of a law, such as (SI 1998/1833), that follows its title."""
        return at + 1 if at < len(self.items) and self.items[at].role == "law" and self._near(at) else at

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
        self._take(near, far, [*title, *(item for item in places if item.places)])
        return far

    def _near(self, at: int) -> bool:
        """Whether only commas, brackets or the period of an abbreviation ("U.S. Const. art. I") precede an item."""
        gap, signs = set(self.items[at].gap), set(" ,()[]")
        return gap <= signs or (gap <= signs | {"."} and self.text[self.items[at].start].islower())

    def _beside(self, at: int) -> bool:
        """Whether item `at` follows an uncited one with at most commas or brackets between them."""
        return at > 0 and not self.taken[at - 1] and self._near(at)

    def _chain(self, at: int, step: int) -> int:
        """The end of the chain of places, joined by commas and "and", that starts at `at`; step: 1 forwards, −1
        backwards."""
        end = at
        while 0 <= (place := at if step > 0 else at - 1) < len(self.items):
            item = self.items[place]
            if not self._beside(at) and not (step > 0 and self._near(place)):
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
        if not item.big or item.norm not in ENACTED | ADOPTED:
            return
        if " ".join(word.norm for word in self.items[max(0, at - 2) : year]) in COURTS.values():
            self._places(at - 2, year)
            return
        opened = False
        if (
            self._joined(year) and self.items[year].gap.strip() == "(" and not self.items[year].role
        ):  # a remark in brackets, unless it is the year
            while (
                year < at + FAR and self._joined(year) and not self.items[year].year and ")" not in self.items[year].gap
            ):
                year += 1
        dated = self._joined(year) and self.items[year].year and set(self.items[year].gap) <= set(" ,()[]")
        if not dated and opened:
            return
        first, end = self._names_before(at), year + 1 if dated else at + 1
        named = not all(word.norm in ARTICLES for word in self.items[first:at])
        if item.norm in ADOPTED and self._joined(end) and self.items[end].norm in ("of", "on"):  # Treaty of Rome
            before, end = end, self._names_after(end)
            named |= end > before
        far = self._numbered(end)
        alone = dated or item.norm in ("act", "regulations", "rules") or far > end
        if named and self._places(first, far) is None and alone:
            self._take(first, far)

    def _code(self, at: int) -> None:
        """Record a section of the United States Code or the Code of Federal Regulations."""
        if self.items[at].norm in ("usc", "cfr") and at and self.items[at - 1].norm.isdecimal() and self._beside(at):
            self._places(at - 1, at + 1)

    def _signed(self, at: int) -> None:
        """Record a place with a section sign after an abbreviated name, such as Cal. Civ. Code § 1714."""
        item, first = self.items[at], at
        if not item.places or self.text[item.start] != "§":
            return
        while first and at - first < 8 and not self.taken[first - 1] and set(self.items[first].gap) <= set(" .,()"):
            before = self.items[first - 1]
            if before.places or not (before.big or before.norm in LINKS) or before.norm in OPENINGS - LINKS:
                break
            first -= 1
        while first < at and not self.items[first].big:
            first += 1
        if first < at:
            self._take(first, self._chain(at, 1))

    def _number(self, at: int) -> None:
        """Record a report or the number of a law that stands alone."""
        if self.items[at].role == "law":
            if self._places(at, at + 1) is None:
                self._take(at, at + 1)
        elif self.items[at].role == "report":
            self._take(at, self._report(at + 1))

    def _acronym(self, at: int) -> None:
        """Record a place in a law that is named by its initials, such as art 6 ECHR."""
        item = self.items[at]
        if (
            len(item.norm) > 1
            and item.norm.isalpha()
            and self.text[item.start : item.end].isupper()
            and item.norm not in STATES
        ):
            first = (
                at - 1
                if at and self.items[at - 1].norm in STATES and self._joined(at) and not self.taken[at - 1]
                else at
            )
            self._places(first, at + 1)

    def _case(self, at: int) -> None:
        """Record two parties with a v between them, with or without a report, or "Re" with a name and a report."""
        item, end = self.items[at], self._names_after(at + 1)
        if end == at + 1:
            return
        if item.norm == "v" and (first := self._names_before(at)) < at:
            self._take(first, self._report(end))
        elif item.norm == "re" and (item.big or (at and self.items[at - 1].norm == "in" and self.items[at - 1].big)):
            far = self._report(self._remark(end))
            if far > end or not item.big:  # "In re" needs no report
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
        """The end of the reports that follow an item, or of a year in brackets."""
        at = first
        while self._joined(at) and self.items[at].role == "report" and set(self.items[at].gap) <= set(" ,.()[]="):
            at += 1
        if at == first and self._joined(at) and self.items[at].year and self.items[at].gap.strip(" ,") in ("(", "["):
            at += 1
        return at
