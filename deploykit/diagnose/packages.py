"""Which package to install for a module that is missing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

_PACKAGES = {
    "Crypto": "pycryptodome",
    "Cython": "cython",
    "Levenshtein": "levenshtein",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "SimpleITK": "simpleitk",
    "absl": "absl-py",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "ffmpeg": "ffmpeg-python",
    "fitz": "pymupdf",
    "git": "gitpython",
    "google.protobuf": "protobuf",
    "hydra": "hydra-core",
    "ignite": "pytorch-ignite",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "open_clip": "open-clip-torch",
    "pkg_resources": "setuptools",
    "psycopg2": "psycopg2-binary",
    "pynvml": "nvidia-ml-py",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "umap": "umap-learn",
    "whisper": "openai-whisper",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Modules whose packages have another name."""
_SAME_NAME = """
accelerate aiohttp albumentations anthropic bitsandbytes boto3 botocore catboost chromadb click
cloudpickle colorama dask datasets decord deepspeed diffusers dill einops evaluate fairscale fastai
fastapi fire flash_attn flax fsspec ftfy fvcore gdown gensim gradio gymnasium h5py httpx
huggingface_hub imageio importlib_metadata iopath ipdb jax jaxlib jieba jinja2 jiwer joblib
jsonlines keras kornia langchain librosa liger_kernel lightgbm lightning lion_pytorch lmdb loguru
lpips matplotlib mlflow mmcv mmdet mmengine monai moviepy mpi4py msgpack networkx nibabel ninja nltk
numba numpy omegaconf onnx onnxruntime openai openpyxl optax optuna orjson packaging pandas peft
plotly polars psutil pyarrow pycocotools pydantic pydicom pyspark pytest pytorch_lightning ray regex
requests rich rouge_score s3fs sacrebleu safetensors sagemaker scipy seaborn sentence_transformers
sentencepiece setuptools shapely six soundfile spacy speechbrain sqlalchemy stable_baselines3
submitit sympy tabulate tensorboard tensorboardX tensorflow termcolor tiktoken timm tokenizers toml
torch torch_geometric torch_scatter torchao torchaudio torchdata torchmetrics torchvision torchx
tqdm trackio transformer_engine transformers triton trl typer typing_extensions ultralytics uvicorn
vllm wandb webdataset xformers xgboost zarr zstandard
"""
"""Modules whose packages have their name, with `-` for `_`. No others are to be installed: on PyPI
`apex`, `clip` or a misspelled name may be anybody's."""
_PACKAGES |= {module: module.replace("_", "-") for module in _SAME_NAME.split()}
_SIMILAR = 0.8
"""Least ratio of difflib: two letters of five that are exchanged."""


def of(module: str) -> str | None:
    """The package of a module such as ``sklearn.svm``; None unless it is a known one."""
    first, *rest = module.split(".")
    return _PACKAGES.get(".".join([first, *rest[:1]])) or _PACKAGES.get(first)


def about(module: str, own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """What a fix says of a missing module: its `package`, or else a `similar` known module.

    `own` maps each module of the source to its `folder`, such as ``src``, if Python does not look
    there. `unlisted` is the module if nothing else is known.
    """
    if package := of(module):
        return {"package": package}
    first = module.partition(".")[0]
    if folder := own.get(first):
        return {"folder": folder}
    known = [name for name in (*own, *_PACKAGES) if name != first]
    near = difflib.get_close_matches(first, known, n=1, cutoff=_SIMILAR)
    return {"similar": near[0]} if near else {"unlisted": module}
