"""deploykit: one PyTorch trainer on a laptop, a Slurm cluster or SageMaker, unchanged."""

__version__ = "0.2.0"
