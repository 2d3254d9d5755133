"""A web page for the legal assistant: shows an answer's sections as they arrive, and checks its citations."""

from collections.abc import Callable, Iterator
from html import escape

from qat_lora.data.appearance import visible
from qat_lora.data.chat import after_thought
from qat_lora.errors import UserError
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.sections import SECTIONS, Answer
from qat_lora.rl.completion import Stream

EXAMPLES = (
    "A baker broke a simple contract with a supplier on 3 May 2021. Find the last day for issuing the claim.",
    "My landlord received my tenancy deposit on 9 March 2022. Can you tell me the last day for protecting the deposit?",
)
CUT_OFF = "✗ cut off before its end, so the last citation may be incomplete; raise --max-new-tokens"
NOTICE = "For research only, not legal advice. Check every citation."
STYLE = """
.law section { border: 1px solid #8884; border-radius: 8px; padding: .5em .9em; margin: .5em 0; }
.law h4 { margin: 0 0 .2em; font-size: .8em; opacity: .7; }
.law p { margin: 0; white-space: pre-wrap; }
.law .known { color: #1a7f37; }
.law .unknown { color: #cf222e; font-weight: 600; }
"""


def verdicts(answer: Answer, authorities: Authorities) -> list[tuple[str, bool]]:
    """The authorities that an answer cites, and whether each is in the list."""
    known, others = authorities.cited(answer)
    return [(name, True) for name in sorted(known)] + [(name, False) for name in sorted(others)]


def verdict_line(name: str, known: bool) -> str:
    return f"✓ {name}" if known else f"✗ {name}: not in the list of authorities"


def show(answer: Answer, authorities: Authorities, whole: bool) -> str:
    """The answer as HTML: a block for each section, or a single block for text without sections; if `whole`, also its
    citations. Shows "thinking …" until text arrives."""
    if not whole and not answer.text:
        return '<div class="law"><p>thinking …</p></div>'
    blocks = [(name, title, answer.sections[name]) for name, title in SECTIONS.items() if name in answer.sections] or [
        ("text", "Answer without sections", answer.text)
    ]
    parts = [f'<section class="{name}"><h4>{title}</h4><p>{escape(body)}</p></section>' for name, title, body in blocks]
    if whole:
        lines = [
            f'<p class="{"known" if known else "unknown"}">{escape(verdict_line(name, known))}</p>'
            for name, known in verdicts(answer, authorities)
        ] or ["<p>nothing is cited</p>"]
        if not answer.ended:
            lines.append(f'<p class="unknown">{CUT_OFF}</p>')
        if not answer.in_order:
            lines.append('<p class="unknown">✗ the five sections are not all there in order</p>')
        parts.append(f'<section class="verdict"><h4>Citations</h4>{"".join(lines)}</section>')
    return f'<div class="law">{"".join(parts)}</div>'


def checked_question(question: str | None) -> str:
    """The question, stripped; raises UserError if it is missing or shows nothing."""
    if not visible(question or ""):
        raise UserError("the question is empty; type one")
    return question.strip()


def page(ask: Callable[[str], Stream], authorities: Authorities, about: str, opened: bool):
    """A Gradio page that calls `ask` to answer a question. opened: whether answers begin inside a thought."""
    import gradio

    def answered(question: str | None) -> Iterator[str]:  # the API may send null
        text = ""
        try:
            pieces = ask(checked_question(question))
            for piece in pieces:
                text += piece
                yield show(Answer.read(after_thought(text, opened), False), authorities, whole=False)
            yield show(Answer.read(after_thought(pieces.text, opened), pieces.ended), authorities, whole=True)
        except UserError as error:
            yield f'<div class="law"><p class="unknown">{escape(str(error))}</p></div>'

    with gradio.Blocks(title="Legal assistant") as blocks:
        gradio.Markdown(f"## Legal assistant\n{about}\n\n*{NOTICE}*")
        question = gradio.Textbox(label="Question", lines=3, elem_id="question")
        with gradio.Row():
            asked = gradio.Button("Ask", variant="primary", elem_id="ask")
            stopped = gradio.Button("Stop", elem_id="stop")
        said = gradio.HTML(elem_id="answer")
        gradio.Examples([[text] for text in EXAMPLES], [question])
        running = [trigger(answered, question, said) for trigger in (asked.click, question.submit)]
        stopped.click(None, cancels=running)
    return blocks
