"""The series that publish law reports: those of the U.S. from reporters-db, and those of other common-law countries."""

import re
from functools import cache

# Reports cited without their year in brackets; with it, any abbreviation is a report.
OTHERS = """
AC App Cas|QB|QBD|KB|Ch|Ch D|Fam|P|PD|CPD|Ex D|WLR|All ER|All ER (D)|All ER (Comm)|ER|TLR|LT|LJ|LJKB|LJQB|LJ Ch|LJ Ex|
Cr App R|Cr App R (S)|Cr App Rep|Lloyd's Rep|Lloyds Rep|ICR|IRLR|BCLC|BCC|EHRR|ECHR|CMLR|ECR|HL Cas|HLC|LR HL|LR QB|
LR CP|LR Ex|LR Eq|LR Ch App|Ch App|B & S|B & Ald|B & Ad|B & C|M & W|Ad & E|E & B|El & Bl|H & N|H & C|Ex|Exch|CB|CB NS|
CB (NS)|Bing|Bing NC|Burr|Cowp|Term Rep|TR|Taunt|Camp|Stark|C & P|Co Rep|Str|Salk|Ld Raym|Mod|Ves|Ves Jr|Beav|Hare|
De GM & G|Mac & G|My & Cr|Ph|Russ|Sim|P & CR|EGLR|HLR|FLR|FCR|RPC|FSR|TC|STC|SC|SC (HL)|SLT|SCLR|CLR|ALR|NSWLR|VR|
DLR|SCR|OR|NZLR|IR|ILRM|SCC|AIR|LGR|RTR|JP|BMLR|PNLR|PIQR|Med LR|WN|Sol Jo|NI|BLR|Con LR|JPL|Bus LR|Env LR|OJ
""".replace("AC App Cas", "AC|App Cas")


def folded_name(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


@cache
def _known() -> dict[str, str]:
    from reporters_db import EDITIONS, VARIATIONS_ONLY  # loaded by the first text that is read

    spelled = {other: names[0] for other, names in VARIATIONS_ONLY.items()} | {name: name for name in EDITIONS}
    american = {folded_name(other): folded_name(name) for other, name in spelled.items()}
    return american | {name: name for name in map(folded_name, OTHERS.replace("\n", "").split("|"))}


def reporter(name: str) -> str | None:
    """The one name of a series that is cited under several ("US" and "U.S. Rep." → "us"), in lower case and without
    spaces and punctuation; None if it is not known."""
    return _known().get(name)
