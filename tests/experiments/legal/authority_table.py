# ruff: noqa: E501, RUF005
"""How well authorities are recognised: 120 authorities and as many invented ones, written by hand in several spellings.

    PYTHONPATH=. python tests/experiments/legal/authority_table.py     (prints the table of docs/cot-sft.md)

The spellings are made here, by templates, without the grammar that reads them.
"""

import random
from collections import defaultdict

ACTS = [
    ("Sale of Goods Act", 1979), ("Theft Act", 1968), ("Occupiers' Liability Act", 1957), ("Land Registration Act", 2002),
    ("Misrepresentation Act", 1967), ("Unfair Contract Terms Act", 1977), ("Companies Act", 2006),
    ("Trusts of Land and Appointment of Trustees Act", 1996), ("Police and Criminal Evidence Act", 1984),
    ("Arbitration Act", 1996), ("Landlord and Tenant Act", 1954), ("Matrimonial Causes Act", 1973),
    ("Senior Courts Act", 1981), ("Fraud Act", 2006), ("Insolvency Act", 1986),
]  # fmt: skip
UK_CASES = [
    ("Jameel", "Wall Street Journal Europe", "[2006] UKHL 44", "[2007] 1 AC 359"),
    ("Chester", "Afshar", "[2004] UKHL 41", "[2005] 1 AC 134"),
    ("Barker", "Corus UK Ltd", "[2006] UKHL 20", "[2006] 2 AC 572"),
    ("Arnold", "Britton", "[2015] UKSC 36", "[2015] AC 1619"),
    ("Montgomery", "Lanarkshire Health Board", "[2015] UKSC 11", "[2015] AC 1430"),
    ("Patel", "Mirza", "[2016] UKSC 42", "[2017] AC 467"),
    ("Prest", "Petrodel Resources Ltd", "[2013] UKSC 34", "[2013] 2 AC 415"),
    ("Hounga", "Allen", "[2014] UKSC 47", "[2014] 1 WLR 2889"),
    ("Sienkiewicz", "Greif Ltd", "[2011] UKSC 10", "[2011] 2 AC 229"),
    ("Jones", "Kernott", "[2011] UKSC 53", "[2012] 1 AC 776"),
    ("Stack", "Dowden", "[2007] UKHL 17", "[2007] 2 AC 432"),
    ("Mosley", "News Group Newspapers Ltd", "[2008] EWHC 1777 (QB)", "[2008] EMLR 20"),
    ("Parker", "South Eastern Railway Co", "(1877) 2 CPD 416", "(1877) 36 LT 540"),
    ("Rylands", "Fletcher", "(1868) LR 3 HL 330", "[1868] UKHL 1"),
    ("Hadley", "Baxendale", "(1854) 9 Exch 341", "(1854) 156 ER 145"),
    ("Wagner", "Grainger", "[1999] EWCA Civ 702", "[1999] 2 All ER 88"),
    ("R", "Jogee", "[2016] UKSC 8", "[2017] AC 387"),
    ("R", "Brown", "[1993] UKHL 19", "[1994] 1 AC 212"),
    ("Attorney General", "Hartwell", "[2004] UKPC 12", "[2004] 1 WLR 1273"),
    ("White", "Chief Constable of South Yorkshire", "[1998] UKHL 45", "[1999] 2 AC 455"),
]  # fmt: skip
US_CASES = [
    ("Miranda", "Arizona", 384, "U.S.", 436, 1966, "86 S. Ct. 1602"),
    ("Gideon", "Wainwright", 372, "U.S.", 335, 1963, "83 S. Ct. 792"),
    ("Mapp", "Ohio", 367, "U.S.", 643, 1961, "81 S. Ct. 1684"),
    ("Katz", "United States", 389, "U.S.", 347, 1967, "88 S. Ct. 507"),
    ("Terry", "Ohio", 392, "U.S.", 1, 1968, "88 S. Ct. 1868"),
    ("Lawrence", "Texas", 539, "U.S.", 558, 2003, "123 S. Ct. 2472"),
    ("Obergefell", "Hodges", 576, "U.S.", 644, 2015, "135 S. Ct. 2584"),
    ("Chevron U.S.A. Inc.", "Natural Resources Defense Council", 467, "U.S.", 837, 1984, "104 S. Ct. 2778"),
    ("Twombly", "Bell Atlantic Corp.", 425, "F.3d", 99, 2005, "313 F. Supp. 2d 174"),
    ("Hamilton", "Accu-Tek", 62, "F. Supp. 2d", 802, 1999, "47 F.R.D. 330"),
    ("Palsgraf", "Long Island Railroad Co.", 248, "N.Y.", 339, 1928, "162 N.E. 99"),
    ("MacPherson", "Buick Motor Co.", 217, "N.Y.", 382, 1916, "111 N.E. 1050"),
    ("Tarasoff", "Regents of the University of California", 17, "Cal. 3d", 425, 1976, "551 P.2d 334"),
    ("Escola", "Coca Cola Bottling Co.", 24, "Cal. 2d", 453, 1944, "150 P.2d 436"),
    ("Hawkins", "McGee", 84, "N.H.", 114, 1929, "146 A. 641"),
]  # fmt: skip
INSTRUMENTS = [
    ("Working Time Regulations", 1998, 1833), ("Civil Jurisdiction Order", 2001, 3929),
    ("Management of Health and Safety at Work Regulations", 1999, 3242), ("Package Travel Regulations", 1992, 3288),
    ("Transfer of Undertakings Regulations", 2006, 246), ("Privacy and Electronic Communications Regulations", 2003, 2426),
    ("Money Laundering Regulations", 2017, 692), ("Building Regulations", 2010, 2214),
    ("Insolvency Rules", 1986, 1925), ("Town and Country Planning Order", 1987, 764),
]  # fmt: skip
EU_LAWS = [
    ("Regulation", "EU", "2016/679"), ("Regulation", "EC", "44/2001"), ("Regulation", "EU", "1215/2012"),
    ("Regulation", "EC", "593/2008"), ("Regulation", "EC", "864/2007"), ("Directive", "EC", "2000/78"),
    ("Directive", "EEC", "93/13"), ("Directive", "EU", "2019/770"), ("Directive", "EC", "2003/88"),
    ("Directive", "EEC", "85/374"),
]  # fmt: skip
EU_CASES = [
    ("Francovich", "C-6/90", "EU:C:1991:428"), ("Schrems", "C-362/14", "EU:C:2015:650"),
    ("Mangold", "C-144/04", "EU:C:2005:709"), ("Marshall", "C-271/91", "EU:C:1993:335"),
    ("Digital Rights Ireland", "C-293/12", "EU:C:2014:238"),
]  # fmt: skip
CODES = [(42, "1983"), (18, "922(g)(1)"), (28, "1331"), (15, "78j(b)"), (11, "362(a)")]
RULES = [(17, "240.10b-5"), (29, "1604.11"), (40, "52.21"), (12, "226.5"), (47, "64.1200(a)(1)")]
SECTIONS = ["5", "13(1)", "2(2)(a)", "14A", "25", "1(3)", "30", "75(1)(b)"]
LISTS = [
    ("s 2(1)-(3)", "ss 2(1), 2(2) and 2(3)", "section 2(1) to (3)", "s 2(1), (2) and (3)", "sections 2(1)-2(3)"),
    ("s 53(1)(b) and (c)", "ss 53(1)(b) and 53(1)(c)", "section 53(1)(b), (c)", "s 53 (1)(b) & (c)", "s 53(1)(b)-(c)"),
    ("ss 5-8", "ss 5, 6, 7 and 8", "sections 5 to 8", "sections 5–8", "ss. 5 - 8"),
    ("ss 2(1) and 2(3)", "s 2(1) and (3)", "section 2(1), (3)", "sections 2(1) and 2(3)", "ss. 2 (1) & (3)"),
    ("ss 11, 14 and 33", "sections 11, 14 and 33", "s 11, s 14 and s 33", "ss. 11, 14, 33", "section 11, section 14, section 33"),
]  # fmt: skip


def acts() -> list[list[str]]:
    made = [[f"{name} {year}, s {s}", f"section {s} of the {name} {year}", f"{name} {year} s.{s}", f"s {s}, {name} {year}",
             f"{name.upper()} {year}, Section {s}", f"{name} {year} (c 12), § {s}"]
            for (name, year), s in zip(ACTS * 2, SECTIONS * 4)][:20]  # fmt: skip
    later = [(name, year + more) for more in (1, 2) for name, year in ACTS[::-1]]
    made += [
        [f"{name} {year}, {form}" for form in forms] + [f"{forms[0]} of the {name} {year}"]
        for (name, year), forms in zip(later, LISTS * 4)
    ]
    return made


def cases() -> list[list[str]]:
    made = [
        [f"{a} v {b} {one}, {two}", f"{a} v. {b} {two}", f"{a} v {b} {one}", one, f"{a} v {b} {two}, {one}",
         f"{a} v {b} {one} at [120]", f"{a} v {b} {one}, {two} (HL)", f"{a} v {b} {two}, 580", f"{a} v {b} {one}, para 12"]
        for a, b, one, two in UK_CASES
    ]  # fmt: skip
    made += [
        [f"{a} v. {b}, {volume} {series} {page}, {other} ({year})", f"{a} v. {b}, {volume} {series} {page} ({year})",
         f"{a} v {b} ({year}) {volume} {series.replace('.', '')} {page}", f"{volume} {series} {page}",
         f"{a} v. {b}, {volume} {series} {page}, {page + 9} ({year})", f"{a} v. {b}, {other} ({year})"]
        for a, b, volume, series, page, year, other in US_CASES
    ]  # fmt: skip
    made += [
        [f"Case {number} {name} {ecli}", f"Case {number} {name}", f"{name} ({number})", number, f"{ecli}", f"Case {number}, {ecli}"]
        for name, number, ecli in EU_CASES
    ]  # fmt: skip
    return made


def others() -> list[list[str]]:
    made = []
    for name, year, number in INSTRUMENTS:
        short = {"Regulations": "reg", "Order": "art", "Rules": "r"}[name.split()[-1]]
        long = {"reg": "regulation", "art": "article", "r": "rule"}[short]
        made.append([f"{name} {year} (SI {year}/{number}), {short} 4", f"{name} {year}, {short} 4",
                     f"{long} 4 of the {name} {year}", f"SI {year}/{number}, {short} 4",
                     f"{name} {year}, SI {year} No {number}, {short} 4", f"{name} {year} (S.I. {year}/{number}), {long} 4"])  # fmt: skip
    for at, (kind, body, number) in enumerate(EU_LAWS):
        place, after = 5 + at, f"/{body}" if kind == "Directive" and body != "EU" else ""
        before = "" if after else f" ({body})"
        made.append([f"{kind}{before} {number}{after}, art {place}", f"Article {place} of {kind}{before} {number}{after}",
                     f"Council {kind}{before} No {number}{after}, art {place}", f"{kind} {number}, Art. {place}",
                     f"art {place} {kind.upper()} {number}{after}"])  # fmt: skip
    for title, place in CODES:
        made.append(
            [
                f"{title} U.S.C. § {place}",
                f"{title} USC {place}",
                f"{title} U. S. C. § {place}",
                f"{title} U.S.C. {place}",
            ]
        )
    for title, place in RULES:
        made.append(
            [
                f"{title} C.F.R. § {place}",
                f"{title} CFR {place}",
                f"{title} C. F. R. § {place}",
                f"{title} CFR § {place}",
            ]
        )
    return made + [
        ["UK GDPR, art 6(1)", "Article 6(1) of the UK GDPR", "art. 6(1) UK GDPR", "UK GDPR Art 6(1)"],
        ["ECHR, art 8", "Article 8 ECHR", "art. 8 of the ECHR", "ECHR Art 8"],
        ["Civil Procedure Rules 1998, r 3.4", "CPR 3.4", "CPR r 3.4", "rule 3.4 of the Civil Procedure Rules"],
        ["Human Rights Act 1998, Sch 1, para 3", "para 3 of Schedule 1 to the Human Rights Act 1998",
         "Human Rights Act 1998, Schedule 1, paragraph 3", "Human Rights Act 1998 Sch 1 para 3"],
        ["BGB, § 823", "§ 823 BGB", "Section 823 of the BGB", "§ 823 of the BGB"],
        ["TFEU, art 101", "Article 101 TFEU", "art 101 of the TFEU", "TFEU Art. 101"],
        ["Companies Act 1985, ss 459-461", "ss 459, 460 and 461 of the Companies Act 1985",
         "Companies Act 1985, sections 459 to 461", "sections 459–461 Companies Act 1985"],
        ["Re B (A Child) [2013] UKSC 33, [2013] 1 WLR 1911", "Re B (A Child) [2013] UKSC 33", "[2013] 1 WLR 1911",
         "In re B (A Child) [2013] 1 WLR 1911"],
        ["R (Miller) v Secretary of State [2017] UKSC 5, [2018] AC 61", "R (Miller) v Secretary of State [2017] UKSC 5",
         "R (on the application of Miller) v Secretary of State [2018] AC 61", "[2017] UKSC 5"],
        ["U.S. Const. art. I, § 8", "U.S. Const. art. 1, § 8", "US Const. art. I, § 8", "U.S. Const. art I § 8"],
    ]  # fmt: skip


KINDS = {"acts, sections, lists and ranges": acts, "cases": cases, "instruments, EU and other law": others}

# One way for each kind of form; the numbers are drawn, and none of the 120 has them.
FORMS = [
    "[{year}] UKSC {n}", "[{year}] EWCA Civ {n}", "[{year}] EWHC {n} (Ch)", "[{year}] {m} AC {n}", "({year}) {m} Cr App R {n}",
    "the {name} Act {year}", "the {name} Act", "section {m} of the {name} Act", "the {name} Regulations {year}", "SI {year}/{n}",
    "the {name} Order {year} (SI {year}/{n})", "Regulation (EU) {year}/{n}", "Directive {year}/{m}/EC", "Council Regulation (EC) No {n}/{year}",
    "Case C-{n}/{m}", "EU:C:{year}:{n}", "{m} U.S.C. § {n}", "{m} CFR {n}.{m}", "{n} U.S. {n}", "{n} F.3d {n} (9th Cir. {year})",
    "{n} F. Supp. 2d {n}", "{name} v {other}", "{name} v {other} [{year}] QB {n}", "{name} v. {other}, {n} U.S. {n} ({year})",
    "Re {name} [{year}] EWCA Civ {n}", "Article {m} of the {name} Convention", "art {m} ECHR", "s {m} of the {name} Code",
    "ss {m}-{m}9 of the {name} Act {year}", "{n} N.E.2d {n}",
]  # fmt: skip
NAMES = [
    "Zephyr",
    "Quarry",
    "Willowby",
    "Marchmont",
    "Fennimore",
    "Ostrander",
    "Pendlebury",
    "Kestrel",
    "Harrowgate",
    "Lindqvist",
]


def invented(count: int = 120, seed: int = 0) -> list[str]:
    """Authorities that do not exist, in the forms of those that do, and real parties with the wrong report."""
    rng, made = random.Random(seed), []
    while len(made) < count:
        name, other = rng.sample(NAMES, 2)
        if len(made) % 5 == 4:
            (a, b, *_), (_, _, one, two) = rng.sample(UK_CASES, 2)
            made.append(f"{a} v {b} {rng.choice((one, two))}")
            continue
        form = FORMS[len(made) * 4 // 5 % len(FORMS)]
        made.append(
            form.format(
                year=rng.randrange(1970, 2024),
                n=rng.randrange(700, 999),
                m=rng.randrange(61, 99),
                name=name,
                other=other,
            )
        )
    return made


PROSE = (
    "The court relied on {} here.",
    "Step 2: Under {}, the claim fails.",
    "That follows from {}.",
    "See {}; the rest is fact.",
)


def gold(count: int = 280) -> tuple[int, int]:
    """(rows whose own responses score 100% in every citation metric, rows) of the rows that the generator makes."""
    from qat_lora.experiments.legal.answers import checked_rows, response, score
    from qat_lora.experiments.legal.authorities import Authorities
    from qat_lora.experiments.legal.rules import AUTHORITIES, generate
    from qat_lora.experiments.legal.sections import Answer

    authorities, good = Authorities(AUTHORITIES), 0
    for row in checked_rows(list(generate(count, 7))):
        rates = score([Answer.read(response(row), True)], [row], authorities)
        wanted = {"accuracy": 1, "citation_precision": 1, "citation_recall": 1, "invented": 0}
        good += all(rates[name]["rate"] == rate for name, rate in wanted.items())
    return good, count


def measure() -> tuple[dict[str, tuple[int, int]], tuple[int, int], list[str], list[str]]:
    """({kind and place: (recognised, spellings)}, (seen, invented), what was missed, what was not seen)."""
    from qat_lora.experiments.legal.authorities import Authorities
    from qat_lora.experiments.legal.sections import Answer

    groups = {kind: make() for kind, make in KINDS.items()}
    authorities = Authorities([spellings[0] for made in groups.values() for spellings in made])
    rates, missed, unseen, seen = defaultdict(lambda: [0, 0]), [], [], 0
    for kind, made in groups.items():
        for spellings in made:
            alone = Authorities([spellings[0]])
            wanted = alone.in_section(spellings[0])[0].keys()
            for at, spelling in enumerate(spellings):
                for place, text in (
                    ("section", f"Case Citation: {spelling}"),
                    ("prose", f"Reasoning: {PROSE[at % len(PROSE)].format(spelling)}\nAnswer: Yes."),
                ):
                    known, others = alone.found(Answer.read(text, True))
                    whole = authorities.cited(Answer.read(text, True))
                    good = known.keys() == wanted and not others and whole == ({spellings[0]}, set())
                    rates[kind, place][0] += good
                    rates[kind, place][1] += 1
                    missed += [] if good else [f"{place}: {spelling} (of {spellings[0]}): {known} {others} {whole}"]
    fakes = invented()
    for at, fake in enumerate(fakes):
        text = f"Reasoning: {PROSE[at % len(PROSE)].format(fake)}\nAnswer: Yes."
        if authorities.cited(Answer.read(text, True))[1]:
            seen += 1
        else:
            unseen.append(fake)
    return {name: tuple(found) for name, found in rates.items()}, (seen, len(fakes)), missed, unseen


def table() -> str:
    rates, (seen, fakes), _, _ = measure()
    lines = ["| | authorities | in the citation section | in prose |", "|---|---:|---:|---:|"]
    for kind, make in KINDS.items():
        shown = [f"{found} of {count}" for found, count in (rates[kind, "section"], rates[kind, "prose"])]
        lines.append(f"| {kind} | {len(make())} | {' | '.join(shown)} |")
    lines.append(f"| invented, seen as such | {fakes} | | {seen} of {fakes} |")
    right, rows = gold()
    return "\n".join([*lines, f"| the generator's own rows, all rates 100% | {rows} rows | {right} of {rows} | |"])


if __name__ == "__main__":
    print(table())
    _, _, missed, unseen = measure()
    print(*missed, *unseen, sep="\n")
