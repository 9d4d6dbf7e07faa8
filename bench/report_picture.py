"""The picture of the report in the README: a BERT with an operator that no engine has, compiled and measured.

    python bench/report_picture.py docs/pictures/report.png

Needs `pip install selenium` and `apt-get install chromium chromium-driver`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from selenium import webdriver
from selenium.webdriver.common.by import By
from torch import nn
from transformers import BertConfig, BertModel

import intarsia


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
        )
        self.bert, self.head = BertModel(config), nn.Linear(256, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = self.bert(ids).last_hidden_state
        return self.head(torch.special.i0(state * 0.1).mean(1))


def main() -> None:
    model, ids = Scorer().eval(), torch.randint(0, 1000, (1, 128))
    fast = intarsia.compile(model, (ids,), partition=intarsia.Measured(budget_s=15))
    print(fast.plan)
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1130"):
        options.add_argument(argument)
    with tempfile.TemporaryDirectory() as folder, webdriver.Chrome(options=options) as browser:
        page = Path(folder) / "report.html"
        page.write_text(fast.plan.to_html(), encoding="utf-8")
        browser.get(page.as_uri())
        browser.find_element(By.ID, "search").send_keys("i0\n")
        browser.find_element(By.ID, "search").clear()
        browser.execute_script("document.getElementById('hits').hidden = true")
        browser.save_screenshot(sys.argv[1])


if __name__ == "__main__":
    main()
