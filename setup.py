"""Maps the repository's folders to the package `draft_verify`; the root of the package is `bindings/`."""

from setuptools import find_packages, setup

FOLDERS = {"": "bindings", "kernels": "kernels", "reference": "reference", "bench": "bench"}


def packages() -> dict[str, str]:
    """Every package with the folder it lives in."""
    found = {}
    for name, folder in FOLDERS.items():
        root = ".".join(part for part in ("draft_verify", name) if part)
        found[root] = folder
        for inner in find_packages(folder):
            found[f"{root}.{inner}"] = f"{folder}/{inner.replace('.', '/')}"
    return found


DEMO = [
    "gguf",  # reads the model's GGUF weights
    "tokenizers",  # the model's byte-pair encoding
    "tqdm",  # progress bars
]

setup(
    name="nki-draft-verify",
    version="0.1.0",
    description="Verification attention, acceptance and KV-cache rollback for speculative decoding on AWS Trainium2",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=list(packages()),
    package_dir=packages(),
    package_data={"draft_verify.bench": ["*.jsonl"]},
    install_requires=[
        "numpy>=1.26",  # the references, the emulator, the arrays of the public functions
        "ml_dtypes>=0.5",  # bfloat16 and float8 for NumPy
    ],
    extras_require={
        "demo": DEMO,
        "bench": [*DEMO, "matplotlib>=3.8"],  # matplotlib draws the report's pictures
        "torch": ["torch>=2.6"],  # torch tensors in and out, and the torch.library operators
        # From AWS's own package index only; the packages of these names on PyPI are empty placeholders.
        "neuron": ["neuronx-cc", "torch-neuronx"],
        "test": [
            *DEMO,
            "matplotlib>=3.8",
            "pytest>=8",
            "pytest-xdist>=3.5",  # runs the suite on every core
            "hypothesis>=6.100",  # property tests
            "ruff==0.17.6",  # format and lint; pinned, since another version formats otherwise
            "torch==2.13.0",  # the torch side of the bindings
        ],
    },
)
