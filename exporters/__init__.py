"""Builds bundles and engines. The folder lies at the root and installs as ``tformer_deploy.exporters``."""

if __name__ != "tformer_deploy.exporters":
    raise ImportError("Import this package as tformer_deploy.exporters (pip install -e . makes that name).")
