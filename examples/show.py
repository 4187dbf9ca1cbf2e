"""Prints the first rows of an output folder: python examples/show.py DIR [ROWS].

An output folder is an ordinary Parquet data set; pandas.read_parquet(DIR) reads the same.
"""

import sys
import textwrap
from collections import Counter

import pyarrow.dataset as ds


def main() -> None:
    """Print the counts of the folder and its first rows."""
    folder, num_rows = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 12
    table = ds.dataset(folder, format="parquet").to_table()
    codes = Counter(code for code in table["error_code"].to_pylist() if code is not None)
    print(f"\n{folder}: {table.num_rows} rows; errors: {dict(codes) or 'none'}\n")
    for row in table.slice(0, num_rows).to_pylist():
        text = (
            row["completion"]
            if row["error_code"] is None
            else f"[{row['error_code']}] {row['error_message']}"
        )
        label = f"{row['row_index']:>4}  {row['custom_id'] or '-':<9} "
        print(label + textwrap.shorten(" ".join(text.split()), 140, placeholder=" ..."))


if __name__ == "__main__":
    main()
