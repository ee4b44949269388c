"""Reports: tables, pictures and a page from the folders of many runs."""
