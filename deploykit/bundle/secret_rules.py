"""What a private key or an access token looks like, as data.

The patterns are those that their issuers document and that scanners such as gitleaks and
detect-secrets use. Text that only looks random is not covered: it occurs in any source.
"""

from __future__ import annotations

from typing import NamedTuple

_WORD = rb"[A-Za-z0-9_-]"
_PUT = rb"""[\w.-]{0,20}["'\])]{0,3}\s{0,3}(?:=>|:=|[=:,(\s])\s{0,3}["'(]{0,3}"""
"""From a name to its value, in code, settings or a command: ``KEY = "value"``."""


class TokenRule(NamedTuple):
    """A kind of token. `pattern` is matched where one of `literals` occurs.

    With a group in it, the group is the token and the literal a word in front of it.
    """

    name: str
    literals: tuple[bytes, ...]
    pattern: bytes


KEY_LITERALS = (b"PRIVATE KEY", b"PuTTY-User-Key-File-", b"AGE-SECRET-KEY-1", b"LS0tLS1CRUdJTi")
"""One of these is in every private key; the last is ``-----BEGIN`` in base64."""

MOST_LITERALS = 64
"""The most that vector instructions search for at once; one more makes it five times slower."""

PLACEHOLDERS = (
    *(b"example", b"placeholder", b"changeme", b"dummy", b"your", b"fake", b"redacted"),
    *(b"xxxx", b"....", b"****", b"00000000", b"1234567890", b"0123456789", b"abcdefgh"),
    b"eyjzdwiioiixmjm0nty3odkw",  # the sample of jwt.io
)
"""Parts of the tokens in manuals, in lower case."""

TOKEN_RULES = (
    TokenRule("an AWS access key", (b"AKIA", b"ASIA"), rb"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    TokenRule(
        "an AWS secret key",
        (b"ecret_access_key", b"ECRET_ACCESS_KEY", b"ecretAccessKey"),
        rb"\w{14,16}" + _PUT + rb"([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
    ),
    TokenRule(
        "a GitHub token",
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
        rb"(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{36,})",
    ),
    TokenRule(
        "a GitLab token",
        (b"glpat-", b"gldt-", b"glrt-"),
        rb"gl[a-z]{2,3}-" + _WORD + rb"{20,}",
    ),
    TokenRule("a Hugging Face token", (b"hf_",), rb"hf_[A-Za-z0-9]{34,}(?!\w)"),
    TokenRule(
        "a Slack token",
        (b"xox", b"xapp-"),
        rb"x(?:ox[abeoprs]|app)-(?=[\w-]*\d)[A-Za-z0-9-]{10,}",
    ),
    TokenRule(
        "a Slack webhook",
        (b"hooks.slack.com/services/",),
        rb"[a-z./]+T[A-Z0-9]{8,}/B[A-Z0-9]{8,}/[A-Za-z0-9]{20,}",
    ),
    TokenRule(
        "a Discord webhook", (b"/api/webhooks/",), rb"/api/webhooks/\d{17,20}/" + _WORD + rb"{60,}"
    ),
    TokenRule("an Anthropic API key", (b"sk-",), rb"sk-ant-[a-z]+\d\d-" + _WORD + rb"{32,}"),
    TokenRule(
        "an OpenAI API key",
        (b"sk-",),
        rb"sk-(?:(?:proj|svcacct|admin)-"
        + _WORD
        + rb"{40,}|[A-Za-z0-9]{48}(?!\w)|[0-9a-f]{32}(?!\w))",
    ),
    TokenRule("an OpenRouter API key", (b"sk-",), rb"sk-or-v1-[0-9a-f]{64}"),
    TokenRule("a Groq API key", (b"gsk_",), rb"gsk_[A-Za-z0-9]{48,}"),
    TokenRule("a Replicate token", (b"r8_",), rb"r8_[A-Za-z0-9]{37}(?!\w)"),
    TokenRule("a Perplexity API key", (b"pplx-",), rb"pplx-[A-Za-z0-9]{48}"),
    TokenRule("an xAI API key", (b"xai-",), rb"xai-[A-Za-z0-9]{70,}"),
    TokenRule("a LangSmith API key", (b"lsv2_",), rb"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}"),
    TokenRule("an NVIDIA API key", (b"nvapi-",), rb"nvapi-" + _WORD + rb"{40,}"),
    TokenRule(
        "a Weights & Biases API key",
        (b"wandb", b"WANDB"),
        rb"(?i:wandb[^\n]{0,40}?(?:key|login|token)[^\n]{0,20}?(?<![0-9a-z])([0-9a-f]{40})(?![\w]))",
    ),
    TokenRule("a Weights & Biases API key", (b"wandb",), rb"wandb_v1_\w{40,}"),
    TokenRule(
        "a Kaggle API key", (b"KAGGLE_KEY",), rb"KAGGLE_KEY" + _PUT + rb"([0-9a-f]{32})(?!\w)"
    ),
    TokenRule("a Kaggle API key", (b"KGAT_",), rb"KGAT_[0-9a-f]{32}(?!\w)"),
    TokenRule("a Neptune API token", (b"eyJhcGlfYWRkcmVzcyI6",), rb"eyJ[A-Za-z0-9+/=_-]{60,}"),
    TokenRule(
        "a JSON web token",
        (b"eyJ",),
        rb"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{20,}",
    ),
    TokenRule("a Google API key", (b"AIza",), rb"AIza" + _WORD + rb"{35}(?![\w-])"),
    TokenRule("a Google client secret", (b"GOCSPX-",), rb"GOCSPX-" + _WORD + rb"{28}"),
    TokenRule("a Google access token", (b"ya29.",), rb"ya29\." + _WORD + rb"{40,}"),
    TokenRule("an Azure storage key", (b"AccountKey=",), rb"AccountKey=([A-Za-z0-9+/]{86}==)"),
    TokenRule("an Azure signature", (b"&sig=",), rb"&sig=([A-Za-z0-9%/+]{43,70}(?:%3[Dd]|=))"),
    TokenRule(
        "an Azure client secret",
        (b"7Q~", b"8Q~"),
        rb"(?<=[\w~.]{3})[78]Q~[\w~.-]{31,34}(?![\w~.-])",
    ),
    TokenRule("a Stripe key", (b"sk_live_", b"rk_live_"), rb"[sr]k_live_[A-Za-z0-9]{16,}"),
    TokenRule("a PyPI token", (b"pypi-AgE",), rb"pypi-AgE" + _WORD + rb"{50,}"),
    TokenRule("an npm token", (b"npm_",), rb"npm_[A-Za-z0-9]{36}(?!\w)"),
    TokenRule("an npm token", (b"_authToken",), rb"_authToken\s?=\s?\"?([A-Za-z0-9+/=_-]{20,})"),
    TokenRule("a RubyGems token", (b"rubygems_",), rb"rubygems_[0-9a-f]{48}"),
    TokenRule("a Databricks token", (b"dapi",), rb"dapi[0-9a-f]{32}(?!\w)"),
    TokenRule("a DigitalOcean token", (b"dop_v1_",), rb"dop_v1_[0-9a-f]{64}"),
    TokenRule("a Docker token", (b"dckr_",), rb"dckr_[op]at_" + _WORD + rb"{27,}"),
    TokenRule("a SendGrid API key", (b"SG.",), rb"SG\.[\w-]{20,24}\.[\w-]{39,50}(?![\w-])"),
    TokenRule("a Telegram token", (b":AA",), rb"(?<=[0-9]{8}):AA[\w-]{33}(?![\w-])"),
    TokenRule("a Vault token", (b"hvs.",), rb"hvs\." + _WORD + rb"{80,}"),
    TokenRule(
        "a Terraform token",
        (b".atlasv1.",),
        rb"(?<=[A-Za-z0-9]{14})\.atlasv1\." + _WORD + rb"{60,}",
    ),
    TokenRule("a Sentry token", (b"sntry",), rb"sntry[su]_[A-Za-z0-9+/=_]{60,}"),
    TokenRule("a Grafana token", (b"glsa_",), rb"glsa_[A-Za-z0-9]{32}_[0-9a-f]{8}"),
    TokenRule("a Notion token", (b"ntn_",), rb"ntn_[A-Za-z0-9]{46}(?!\w)"),
    TokenRule("a Linear API key", (b"lin_api_",), rb"lin_api_[A-Za-z0-9]{40}(?!\w)"),
    TokenRule("an Alibaba Cloud access key", (b"LTAI",), rb"LTAI[A-Za-z0-9]{20}(?!\w)"),
    TokenRule("a Tencent Cloud secret ID", (b"AKID",), rb"AKID[A-Za-z0-9]{32}(?!\w)"),
)
