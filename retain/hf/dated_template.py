"""Fixes the day that a chat template writes: what is rendered today is the same tomorrow.

Templates of Llama 3 and gpt-oss write today's date, and with it documents, the split by their hash and the
items of a comparison would change overnight. transformers gives templates the function `strftime_now`; from
5.24 on a caller can replace it no longer, since templates get plain data alone. So a macro of the same name
is written in front of the template.
"""

import datetime
from collections.abc import Sequence
from typing import Any

# The day that Llama 3's template writes where it is given none.
TODAY = datetime.datetime(2024, 7, 26)
DIRECTIVES = (*"aAbBcdeHIjmMpSuUwWxXyY", "-d", "-m", "-H", "-I", "-M")


def dated_template(tokenizer: Any, tools: Sequence[Any] | None = None) -> str | None:
    """The chat template that a tokenizer would take, with `TODAY` in place of the day on which it is asked.

    Args:
        tokenizer: of transformers.
        tools: that the model may call; some tokenizers have a template for them.

    Returns:
        a template to be passed to `apply_chat_template`; None where nothing is to be replaced.
    """
    if not hasattr(tokenizer, "get_chat_template"):
        return None
    template = str(tokenizer.get_chat_template(tools=list(tools) if tools else None))
    if "strftime_now" not in template:
        return None
    written = "".join(f" | replace('%{name}', '{TODAY.strftime(f'%{name}')}')" for name in DIRECTIVES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{written} }}}}{{% endmacro %}}{template}"
