"""Legal periods: how long each runs, from which day, and how dates are counted in days and months."""

import calendar
from collections.abc import Callable
from datetime import date, timedelta


def name_of(when: date) -> str:
    """The name of a month."""
    return calendar.month_name[when.month]


def day(when: date) -> str:
    return f"{when.day} {name_of(when)} {when.year}"


def later(when: date, months: int) -> date:
    """The corresponding date `months` later, or the last day of a month that has no such date."""
    year, month = divmod(when.year * 12 + when.month - 1 + months, 12)
    return date(year, month + 1, min(when.day, calendar.monthrange(year, month + 1)[1]))


def days(count: int) -> Callable[[date], tuple[date, str]]:
    """The day `count` days later, and how to count it across the ends of months."""

    def end(when: date) -> tuple[date, str]:
        total, at = when.day + count, when
        parts = [f"{when.day} + {count} = {total}"]
        while total > (length := calendar.monthrange(at.year, at.month)[1]):
            parts.append(f"{name_of(at)} has {length} days, and {total} − {length} = {total - length}")
            total, at = total - length, later(at.replace(day=1), 1)
        if len(parts) == 1:
            parts.append(f"{name_of(at)} has {length} days")
        return when + timedelta(count), "; ".join(parts) + "."

    return end


def months(count: int, begins: bool = False) -> Callable[[date], tuple[date, str]]:
    """The date `count` months later, and how to count it. begins: the months start with the day itself, so they end the
    day before the corresponding date, or on the last day of a month that has no such date."""

    def end(when: date) -> tuple[date, str]:
        on = later(when, count)
        ending = f"{name_of(on)} {on.year}"
        names = [name_of(later(when, number)) for number in range(1, count + 1)]
        parts = [f"{count} month{'s' * (count > 1)} on: {', '.join(names)} {on.year}"] if count % 12 else []
        if on.day < when.day:
            parts.append(f"{ending} has only {on.day} days, so its last day counts")
        elif begins:
            parts.append(f"the date comes round on {day(on)}")
            on -= timedelta(1)
        return on, capital("; ".join(parts)) + "." if parts else ""

    return end


LAST = "the last day for issuing the claim"
# topic, difficulty, authority, what is asked for, how long the period runs; the law; what happened, in the third person
# and in the client's words; the reasoning step.
PERIODS = (
    ("contract", "easy", "Limitation Act 1980, s 5", LAST, months(72),
     "An action on a simple contract is barred after six years from the accrual of the cause of action.",
     "{who} broke a simple contract with a supplier on {when}.",
     "My supplier broke our contract, which is not a deed, on {when}.", "A simple contract has six years."),
    ("contract", "medium", "Limitation Act 1980, s 8", LAST, months(144),
     "An action upon a specialty, such as a deed, is barred after twelve years.",
     "A covenant in a deed with {who} was broken on {when}.", "A covenant in a deed with me was broken on {when}.",
     "A deed has twelve years."),
    ("tort", "easy", "Limitation Act 1980, s 2", LAST, months(72),
     "An action founded on tort is barred after six years from the accrual of the cause of action.",
     "A trespass to the goods of {who} took place on {when}.", "Somebody damaged my goods on purpose on {when}.",
     "Tort has six years."),
    ("tort", "easy", "Limitation Act 1980, s 4A", LAST, months(12),
     "An action for libel or slander is barred after one year.",
     "A libel of {who} was published on {when}.", "A libel about me was published on {when}.", "Libel has one year."),
    ("personal injury", "easy", "Limitation Act 1980, s 11", LAST, months(36),
     "An action for personal injuries is barred after three years from the accrual or the date of knowledge.",
     "{who} was injured at work through negligence on {when}, and knew so at once.",
     "I was injured at work through negligence on {when}, and knew so at once.", "Personal injury has three years."),
    ("personal injury", "hard", "Limitation Act 1980, s 11A", "the day on which the longstop ends", months(120),
     "A right of action for a defective product is extinguished ten years after its producer put it into circulation.",
     "The product that injured {who} was put into circulation by its producer on {when}.",
     "The product that injured me was put into circulation by its producer on {when}.", "The longstop is ten years."),
    ("employment", "medium", "Employment Rights Act 1996, s 111",
     "the last day for presenting a claim, conciliation aside", months(3, True),
     "A claim for unfair dismissal is presented within three months beginning with the effective date of termination.",
     "{who} was unfairly dismissed, with effect from {when}.", "I was unfairly dismissed, with effect from {when}.",
     "Three months that begin with a day end the day before its date comes round."),
    ("employment", "medium", "Equality Act 2010, s 123", "the last day for presenting a complaint, conciliation aside",
     months(3, True),
     "A complaint of discrimination at work is brought within three months starting with the date of the act.",
     "{who} was refused a promotion because of her sex on {when}.",
     "I was refused a promotion because of my sex on {when}.",
     "Three months that start with a day end the day before its date comes round."),
    ("consumer", "easy", "Consumer Rights Act 2015, s 22", "the last day of the short-term right to reject", days(30),
     "Faulty goods may be rejected within 30 days, beginning with the day after delivery.",
     "{who} was delivered a faulty washing machine on {when}.",
     "A faulty washing machine was delivered to me on {when}.", "The right lasts 30 days from the day after."),
    ("consumer", "easy",
     "Consumer Contracts (Information, Cancellation and Additional Charges) Regulations 2013, reg 30",
     "the last day for cancelling", days(14),
     "A sale at a distance may be cancelled within 14 days after the day on which the goods arrive.",
     "Shoes that {who} had bought online arrived on {when}.", "Shoes that I had bought online arrived on {when}.",
     "Fourteen days follow that day."),
    ("housing", "easy", "Protection from Eviction Act 1977, s 5",
     "the earliest day on which the notice can take effect", days(28),
     "A notice to quit a dwelling has to be given not less than four weeks before it takes effect.",
     "The landlord gave {who}, a periodic tenant, notice to quit on {when}.",
     "My landlord gave me, a periodic tenant, notice to quit on {when}.", "Four weeks are 28 days."),
    ("housing", "medium", "Housing Act 2004, s 213", "the last day for protecting the deposit", days(29),
     "A tenancy deposit has to be protected within 30 days beginning with the date on which it is received.",
     "The landlord of {who} received a tenancy deposit on {when}.",
     "My landlord received my tenancy deposit on {when}.", "The day itself is the first of the 30."),
    ("property", "medium", "Limitation Act 1980, s 15", LAST, months(144),
     "An action to recover unregistered land is barred after twelve years.",
     "A squatter took possession of unregistered land of {who} on {when}.",
     "A squatter took possession of my unregistered land on {when}.", "Land has twelve years."),
    ("property", "medium", "Inheritance (Provision for Family and Dependants) Act 1975, s 4",
     "the last day for an application that needs no permission", months(6),
     "An application for provision is made within six months from the grant of representation.",
     "Probate of the will of {who} was granted on {when}; the widow wants provision.",
     "Probate of my husband's will was granted on {when}; I want provision.", "Six months follow the grant."),
    ("public law", "hard", "Civil Procedure Rules, r 54.5", "the last day for filing the claim form", months(3),
     "A claim for judicial review is filed promptly and not later than three months after the grounds first arose.",
     "A decision against {who}, which is not on planning, was taken on {when}.",
     "The council took a decision against me, not on planning, on {when}.", "Three months are the most."),
    ("public law", "easy", "UK GDPR, art 12(3)", "the last day for an answer that is not extended", months(1),
     "A request of access is answered within one month of its receipt.",
     "A company received a request of access from {who} on {when}.",
     "A company received my request for my personal data on {when}.", "One month follows."),
    ("criminal", "medium", "Magistrates' Courts Act 1980, s 127", "the last day for laying the information", months(6),
     "An information for a summary offence is laid within six months from the offence.",
     "{who} is said to have committed a summary offence on {when}.",
     "I am said to have committed a summary offence on {when}.", "A summary offence has six months."),
)  # fmt: skip


def capital(text: str) -> str:
    return text[0].upper() + text[1:]
