"""`gradveil reproduce` as a person types it."""

from __future__ import annotations


def test_all_recipes_are_listed(gradveil) -> None:
    code, out, _ = gradveil("reproduce", "--list")
    assert code == 0 and sum("; data: " in line for line in out.splitlines()) == 46
    assert "loda/table2" in gradveil("list", "recipes")[1]


def test_a_plan_says_cells_iterations_and_time_and_runs_nothing(gradveil, tmp_path) -> None:
    out_folder = tmp_path / "out"
    code, out, _ = gradveil("reproduce", "dcs2/table4", "--scale", "paper", "--plan", "--out", str(out_folder))
    assert code == 0 and "4 cells" in out and "1,280,000 iterations" in " ".join(out.split())
    assert not out_folder.exists()


def test_slips_are_told_in_a_line(gradveil) -> None:
    assert "did you mean 'loda/table1'" in gradveil("reproduce", "loda/tabel1")[2]
    assert "scale='gpu': input should be 'cpu' or 'paper'" in gradveil("reproduce", "loda/table1", "--scale", "gpu")[2]
    assert "such devices here" in gradveil("reproduce", "loda/table1", "--device", "cuda:9")[2]
    assert "name a recipe" in gradveil("reproduce")[2]


def test_a_recipe_of_ones_own_is_run_and_its_table_printed_in_80_columns(gradveil, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "title: Mine\naudits: {a: {data: mnist-5k, victims: 1}}\ncell: {audit: a, attack: 'ig:steps=2'}\n"
        "rows: {none: {defense: none}}\ncolumns: {PSNR: {metric: psnr}}\npublished: {none: [41.5]}\n"
        "source: Table 3 of nothing.\nclaims: [{text: it is exact, at_least: [60, none | PSNR]}]\n"
    )
    code, out, _ = gradveil("reproduce", str(file), "--out", str(tmp_path / "out"))
    assert code == 0 and "|" not in out.replace("none | PSNR", "")
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "row column here published" in words and " 41.5 " in words and "it is exact does not hold" in words
    assert "Published: Table 3 of nothing." in out
    assert (tmp_path / "out" / "results").is_dir()
