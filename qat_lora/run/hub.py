"""Find out quickly whether the Hugging Face hub can provide something."""

from functools import lru_cache

from qat_lora.errors import first_line

# One probe without retries: the hub's own client retries for 23 s (measured) before it reports a missing network.
PROBE_SECONDS = 8


@lru_cache
def hub_fault(kind: str, name: str) -> str | None:
    """Why the hub cannot provide the "model" or "dataset" `name` (no network, not found), or None if it can."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError

    try:
        getattr(HfApi(), f"{kind}_info")(name, timeout=PROBE_SECONDS)
    except RepositoryNotFoundError:
        return f"no such {kind}, or no access to it"
    except (HTTPError, OSError, ValueError) as error:
        return first_line(error)
    return None
