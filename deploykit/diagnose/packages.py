"""Which package to install for a module that is missing."""

from __future__ import annotations

_PACKAGES = {
    "Crypto": "pycryptodome",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "git": "gitpython",
    "google.protobuf": "protobuf",
    "hydra": "hydra-core",
    "ignite": "pytorch-ignite",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "pynvml": "nvidia-ml-py",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "umap": "umap-learn",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Modules whose packages have another name."""


def of(module: str) -> str:
    """The package of a module such as ``sklearn.svm``: usually it has the module's first name."""
    first = module.partition(".")[0]
    known = _PACKAGES.get(".".join(module.split(".")[:2])) or _PACKAGES.get(first)
    return known or first.replace("_", "-")
