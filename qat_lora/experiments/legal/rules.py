"""Questions on English law whose answers can be computed, over a closed list of authorities (law as of January 2024).

A rule draws facts and computes what the law says about them, so a model's answer can be checked, and anything it cites
that is not in AUTHORITIES is invented. For training models only, not legal advice.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta

from qat_lora.errors import UserError
from qat_lora.experiments.legal.periods import PERIODS, capital, day, name_of

# The largest number of rows with different questions. Types and rules alternate, and the client's question on the
# deposit penalty runs out first: it has 104 deposits in two wordings and occurs once every 112 rows.
LARGEST_COUNT = 23_406
TYPES = ("case_analysis", "educational", "client_interaction", "statutory")
WHO = ("a baker", "a barber", "a bookseller", "a carpenter", "a caterer", "a dentist", "a driver", "a farmer",
       "a florist", "a gardener", "a grocer", "a joiner", "a mechanic", "a musician", "a nurse", "a painter",
       "a plumber", "a roofer", "a tailor", "a teacher")  # fmt: skip
FIRST_DAY, DAYS = date(2019, 1, 1), 5 * 365  # range of drawn dates, during which the law did not change


def money(pounds: float) -> str:
    return f"£{pounds:,.2f}".removesuffix(".00")


@dataclass(frozen=True)
class Facts:
    """One case: what happened (in the third person, and in the client's words), the reasoning steps, the answer's
    figure."""

    told: str
    mine: str
    steps: tuple[str, ...]
    value: str


@dataclass(frozen=True)
class Rule:
    """ask: what is asked for. law: the rule in a sentence. draw: draws the facts of a case."""

    topic: str
    difficulty: str
    authority: str
    ask: str
    law: str
    draw: Callable[[random.Random], Facts]


def _when(rng: random.Random) -> date:
    return FIRST_DAY + timedelta(rng.randrange(DAYS))


def _period(
    happened: str, mine: str, step: str, end: Callable[[date], tuple[date, str]]
) -> Callable[[random.Random], Facts]:
    """Draws the facts of a period that runs from a date. happened, mine: templates with {who} and {when}; step: how
    long it runs; end: computes the day on which it ends, and how to count it."""

    def draw(rng: random.Random) -> Facts:
        when, who = _when(rng), rng.choice(WHO)
        said = {"who": who, "when": day(when)}
        value, counted = end(when)
        steps = (f"Time runs from {day(when)}.", step, counted, f"That leads to {day(value)}.")
        return Facts(happened.format(**said), mine.format(**said), tuple(filter(None, steps)), day(value))

    return draw


def _percent(full: float, share: int) -> str:
    """How to compute `share` per cent, a multiple of 5 of at least 10."""
    tens, five = divmod(share, 10)
    parts = [f"10% of {money(full)} is {money(full / 10)}"]
    parts += [f"{tens}0% is {money(full * tens / 10)}"] * (tens > 1)
    parts += [f"5% is {money(full / 20)}", f"{share}% is {money(full * share / 100)}"] * bool(five)
    return ", ".join(parts) + "."


def _notice(rng: random.Random) -> Facts:
    years, months, who = rng.randint(1, 18), rng.randrange(1, 12), rng.choice(WHO)
    weeks = min(years, 12)
    value = f"{weeks} week{'s' * (weeks > 1)}"
    cap = "Twelve weeks are the most." if years > 12 else "That is within the most of twelve weeks."
    served = f"{years} year{'s' * (years > 1)} and {months} month{'s' * (months > 1)}"
    steps = (f"Of {served} the complete years count, {years}.", "Each counts for one week.", cap)
    told = f"worked for the company for {served}"
    return Facts(f"{who} has {told} and is dismissed.", f"I have {told} and am being dismissed.", steps, value)


def _redundancy(rng: random.Random) -> Facts:
    old, pay, who = rng.random() < 0.5, rng.randrange(300, 640, 5), rng.choice(WHO)
    years = rng.randint(2, 25 if old else 19)  # the ages from 22 to 40 are nineteen years
    counted, rate = min(years, 20), 1.5 if old else 1.0
    weeks, value = counted * rate, money(counted * rate * pay)
    tens = weeks // 10 * 10
    parts = [f"{part:g} × {money(pay)} = {money(part * pay)}, " for part in (tens, weeks - tens) if 0 < part < weeks]
    ages = "all of them from the age of 41 on" if old else "all of them between the ages of 22 and 40"
    steps = (
        f"{counted} years count, of at most twenty.",
        f"Each is worth {rate:g} week's pay: {counted} × {rate:g} = {weeks:g}.",
        f"{''.join(parts)}{weeks:g} × {money(pay)} = {value}.",
    )
    served = f"after {years} complete years of service, {ages}, at a week's pay of {money(pay)}"
    return Facts(f"{who} is made redundant {served}.", f"I am made redundant {served}.", steps, value)


def _fixed_sum(rng: random.Random) -> Facts:
    least, most, fixed, size = rng.choice(
        (
            (100, 1000, 40, "below £1,000"),
            (1000, 10_000, 70, "from £1,000 on and below £10,000"),
            (10_000, 90_000, 100, "from £10,000 on"),
        )
    )
    debt, who, value = rng.randrange(least, most, 10), rng.choice(WHO), money(fixed)
    steps = (
        "The sum depends on the size of the debt: £40 below £1,000, £70 below £10,000, £100 from there on.",
        f"{money(debt)} is {size}.",
        f"So the sum is {value}.",
    )
    late = f"a commercial invoice of {money(debt)} late"
    return Facts(f"A customer pays {who} {late}.", f"A customer has paid my business {late}.", steps, value)


def _interest(rng: random.Random) -> Facts:
    debt, base = rng.randrange(1000, 50000, 500), rng.choice((0.5, 0.75, 1.0, 2.0, 3.5, 5.0, 5.25))
    who = rng.choice(WHO)
    value = money(round(debt * (base + 8) / 100, 2))
    steps = (
        f"The rate is the base rate of {base:g}% and 8%, {base + 8:g}%.",
        "Interest is simple, and one year has passed.",
        f"8% of {money(debt)} is {money(debt * 0.08)}, {base:g}% is {money(debt * base / 100)}.",
        f"{money(debt)} × {base + 8:g}% = {value}.",
    )
    owed = f"a commercial debt of {money(debt)} has been overdue for exactly one year, with a base rate of {base:g}%"
    return Facts(f"In the business of {who} {owed}.", f"In my business {owed}.", steps, value)


def _seat_belt(rng: random.Random) -> Facts:
    full, who, whole = rng.randrange(4000, 200000, 1000), rng.choice(WHO), rng.random() < 0.5
    share = 25 if whole else 15
    cut, value = money(full * share / 100), money(full * (100 - share) / 100)
    would = "would have been avoided altogether" if whole else "would have been a good deal less severe"
    steps = (f"With a belt they {would}: {share}%.", _percent(full, share), f"{money(full)} less {cut} is {value}.")
    hurt = "hurt without a seat belt in a collision that another driver caused"
    rest = f"With a belt the injuries {would}. In full, the damages are {money(full)}."
    return Facts(f"{who} was {hurt}. {rest}", f"I was {hurt}. {rest}", steps, value)


def _contributory(rng: random.Random) -> Facts:
    full, who, share = rng.randrange(4000, 200000, 1000), rng.choice(WHO), rng.randrange(10, 80, 5)
    cut, value = money(full * share / 100), money(full * (100 - share) / 100)
    steps = (f"That share is {share}%.", _percent(full, share), f"{money(full)} less {cut} is {value}.")
    told = (
        f"a claim for negligence with damages of {money(full)} in full; the judge finds the claimant {share}% to blame"
    )
    return Facts(f"{who} brings {told}.", f"I bring {told}.", steps, value)


def _bereavement(rng: random.Random) -> Facts:
    when, who = date(2014, 1, 1) + timedelta(rng.randrange(365 * 9)), rng.choice(WHO)
    new = when >= date(2020, 5, 1)
    value = money(15120 if new else 12980)
    if when.year == 2020:
        side = f"{name_of(when)} is {'not ' * new}before May"
    else:
        side = f"{when.year} is {'after' if new else 'before'} 2020"
    steps = (f"The death was on {day(when)}.", f"{side}.", f"So it is {value}.")
    return Facts(f"The husband of {who} was killed by negligence on {day(when)}.",
                 f"My husband was killed by negligence on {day(when)}.", steps, value)  # fmt: skip


def _letters(which: str) -> Callable[[random.Random], Facts]:
    def draw(rng: random.Random) -> Facts:
        posted, who = _when(rng), rng.choice(WHO)
        arrived = posted + timedelta(1 if which == "instant" else rng.randint(2, 9))
        counts, name = (posted, "posted") if which == "posted" else (arrived, "received")
        sent = "sent" if which == "instant" else "posted"
        what = {
            "posted": "a letter of acceptance, where post was a proper way to answer,",
            "revoked": "a letter that revoked an offer",
            "instant": "an acceptance by telex",
        }[which]
        steps = (
            f"It was {sent} on {day(posted)} and received on {day(arrived)}.",
            f"What counts is the day on which it is {name}.",
            f"That is {day(counts)}.",
        )
        told = f"{sent} {what} on {day(posted)}; it was received on {day(arrived)}"
        return Facts(f"{who} {told}.", f"I {told}.", steps, day(counts))

    return draw


def _deposit(rng: random.Random) -> Facts:
    deposit, who = rng.randrange(400, 3000, 25), rng.choice(WHO)
    rest, value = deposit % 100, money(3 * deposit)
    parts = [f"3 × {money(part)} = {money(3 * part)}, " for part in (deposit - rest, rest) if rest]
    steps = (
        "The penalty lies between once and three times the deposit.",
        f"The deposit is {money(deposit)}.",
        f"{''.join(parts)}3 × {money(deposit)} = {value}.",
    )
    told = f"paid a tenancy deposit of {money(deposit)}, which the landlord never protected"
    return Facts(f"{who} {told}.", f"I {told}.", steps, value)


LATE = "Late Payment of Commercial Debts (Interest) Act 1998, s "
FORMED = "the day on which the contract was made"
RULES = (
    *(Rule(*names, law, _period(told, mine, step, end)) for *names, end, law, told, mine, step in PERIODS),
    Rule("contract", "medium", "Adams v Lindsell (1818) 1 B & Ald 681", FORMED,
         "An acceptance by post is complete when it is posted.", _letters("posted")),
    Rule("contract", "hard", "Byrne & Co v Leon Van Tienhoven & Co (1880) 5 CPD 344",
         "the day on which the revocation took effect",
         "A revocation of an offer takes effect when it reaches the offeree, also by post.", _letters("revoked")),
    Rule("contract", "medium", "Entores Ltd v Miles Far East Corp [1955] 2 QB 327", FORMED,
         "An acceptance by an instantaneous means takes effect when it is received.", _letters("instant")),
    Rule("contract", "easy", LATE + "5A", "the fixed sum for late payment",
         "A supplier is entitled to a fixed sum by the size of the debt.", _fixed_sum),
    Rule("contract", "medium", LATE + "6", "the statutory interest",
         "Statutory interest is simple, at a rate set by order, 8% above the base rate.", _interest),
    Rule("personal injury", "medium", "Froom v Butcher [1976] QB 286",
         "the damages after the reduction for the seat belt",
         "Damages go down by 25% where a seat belt would have prevented the injuries, by 15% where it would have made "
         "them a good deal less severe.", _seat_belt),
    Rule("personal injury", "easy", "Law Reform (Contributory Negligence) Act 1945, s 1",
         "the damages after the reduction",
         "Damages are reduced by the claimant's share in the responsibility for the damage.", _contributory),
    Rule("personal injury", "medium", "Fatal Accidents Act 1976, s 1A", "the bereavement damages",
         "The sum is £15,120 for causes of action from 1 May 2020 on, £12,980 for those from 1 April 2013 until then.",
         _bereavement),
    Rule("employment", "easy", "Employment Rights Act 1996, s 86", "the least notice that the employer must give",
         "After a month the notice is a week at least, from two years on a week for each year, twelve at most.",
         _notice),
    Rule("employment", "medium", "Employment Rights Act 1996, s 162", "the statutory redundancy payment",
         "It is a week's pay for each year from the age of 22, one and a half from 41, for at most twenty years.",
         _redundancy),
    Rule("housing", "hard", "Housing Act 2004, s 214", "the largest penalty that a court can order",
         "A landlord who has not protected a deposit pays between one and three times its amount.", _deposit),
)  # fmt: skip
AUTHORITIES = tuple(sorted(rule.authority for rule in RULES))

ASKED = {
    "case_analysis": ("{told} Analyse the case and give {ask}.", "Consider these facts. {told} Find {ask}."),
    "educational": ("Show a student how to find {ask}. {told}", "By way of an example, work out {ask}. {told}"),
    "client_interaction": ("{mine} Can you tell me {ask}?", "{mine} I need to know {ask}."),
    "statutory": ("Apply {authority}. {told} State {ask}.", "{told} Under {authority}, give {ask}."),
}


def generate(count: int, seed: int) -> Iterator[dict]:
    """`count` different rows with the columns of rzeraat/law (id, question, answer, topic, difficulty, case_citation,
    reasoning, jurisdiction, sample_type); sample types and rules alternate. Row i depends only on seed and i, except
    that it is drawn again if an earlier row has the same question. Raises UserError for a count below 1 or above
    LARGEST_COUNT.
    """
    if not 1 <= count <= LARGEST_COUNT:
        raise UserError(
            f"--count {count} must be from 1 to {LARGEST_COUNT}, the number of different questions; change it"
        )
    seen: set[str] = set()
    for number in range(count):
        kind, rule = TYPES[number % len(TYPES)], RULES[number // len(TYPES) % len(RULES)]
        for attempt in itertools.count():
            rng = random.Random(f"{seed} {number} {attempt}")
            facts = rule.draw(rng)
            question = rng.choice(ASKED[kind]).format(
                told=capital(facts.told), mine=facts.mine, ask=rule.ask, authority=rule.authority
            )
            if question not in seen:
                break
        seen.add(question)
        steps = (rule.law, *facts.steps)
        yield {
            "id": f"law-{number + 1:06d}", "question": question, "answer": f"{capital(rule.ask)}: {facts.value}.",
            "topic": rule.topic, "difficulty": rule.difficulty, "case_citation": rule.authority,
            "reasoning": "\n".join(f"Step {place}: {step}" for place, step in enumerate(steps, 1)),
            "jurisdiction": "England and Wales", "sample_type": kind,
        }  # fmt: skip
