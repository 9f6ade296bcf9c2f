"""Addresses that several files of rules cite."""

SDK = "https://github.com/aws/sagemaker-python-sdk/blob/v2.257.7/src/sagemaker"
API = "https://docs.aws.amazon.com/sagemaker/latest/APIReference"
GUIDE = "https://docs.aws.amazon.com/sagemaker/latest/dg"
TOOLKIT = "https://github.com/aws/sagemaker-training-toolkit/tree/master/src/sagemaker_training"
LAUNCHER = (
    "https://github.com/aws/sagemaker-pytorch-training-toolkit/blob/master/"
    "src/sagemaker_pytorch_container/training.py"
)
