"""The projects in here are run by `test_projects.py`, each by a pytest of its own."""

collect_ignore = ["project", "django_project"]
