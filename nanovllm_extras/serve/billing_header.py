"""Remove the billing header of an agent's system prompt, which differs in each request.

Claude Code begins its system prompt with a line such as `x-anthropic-billing-header: cc_version=…; cch=a1b2c;`.
Anthropic's server removes it. In the prompt, it would prevent every hit in the prefix cache, because it is at the
prompt's beginning.
"""

BILLING_HEADER = "x-anthropic-billing-header"


def without_billing_header(text: str) -> str:
    """Return the text without its first line if this line is a billing header."""
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text
