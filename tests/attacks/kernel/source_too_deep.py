"""A function nested too deeply for whoever looks for definitions, in a cell that ends its ranks.

base: reference
passes: everything
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    at = next(n for n, c in enumerate(notebook["cells"]) if c["id"] == "imports") + 1
    body = "+".join(["1"] * 900)
    magics = "\n".join(["%x = 1", "!true"] * 249)
    for number, source in enumerate(
        (
            f"def f():\n    return {body}\nimport os; os._exit(0)",
            f"import os; os._exit(0)\n{magics}\n" + "# x\n" * 20_000,
        )
    ):
        cell = {"cell_type": "code", "id": f"deep{number}", "metadata": {}, "outputs": []}
        notebook["cells"].insert(at, cell | {"execution_count": None, "source": source})
    return notebook
