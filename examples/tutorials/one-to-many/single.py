"""One process, one device: a small network on scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def digits():
    """1280 training and 517 test images of 8 x 8 pixels, scaled to 0..1."""
    images, labels = load_digits(return_X_y=True)
    whole = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    return torch.utils.data.random_split(whole, [1280, 517], torch.Generator().manual_seed(0))


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, test = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(training, batch_size=64, shuffle=True)
    test_loader = DataLoader(test, batch_size=len(test))

    for epoch in range(6):
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        hits = torch.zeros(1, device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                hits += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        print(f"epoch {epoch}: accuracy {hits.item() / len(test):.6f}", flush=True)

    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
