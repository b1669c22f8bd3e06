# The operator's image; it also carries the agent that every worker pod copies from /regroup/agent.pyz.
#   docker build -t localhost/regroup-operator:dev .
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS tools
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG UV_VERSION=0.13.9
RUN python3 -m venv /uv && /uv/bin/python -m pip install --no-cache-dir --disable-pip-version-check "uv==${UV_VERSION}"

FROM tools AS locked
WORKDIR /src
COPY pyproject.toml uv.lock ./
RUN /uv/bin/uv export --quiet --frozen --no-default-groups --extra operator --no-emit-project --output-file /operator.txt

# Only the locked requirements reach this stage, so that editing pyproject.toml does not install everything anew.
FROM tools AS packages
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
ARG UV_CACHE_DIR=/var/cache/uv
COPY --from=locked /operator.txt /operator.txt
RUN --mount=type=cache,target=/var/cache/uv \
    python3 -m venv --without-pip /opt/regroup && \
    /uv/bin/uv pip install --quiet --link-mode=copy --compile-bytecode --require-hashes \
      --python /opt/regroup/bin/python --requirement /operator.txt

FROM ${BASE_IMAGE} AS agent
COPY trainer-image /src
RUN cd /src && mkdir /regroup && python3 -m _regroup_agent.build /regroup/agent.pyz

FROM ${BASE_IMAGE}
COPY --from=packages /opt/regroup /opt/regroup
ENV PATH=/opt/regroup/bin:/usr/local/bin:/usr/bin:/bin PYTHONPATH=/regroup/lib PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Last, so that a change of our code makes thin layers only.
COPY --from=agent /regroup/agent.pyz /regroup/agent.pyz
COPY trainer-image/regroup/__init__.py /regroup/lib/regroup/__init__.py
COPY trainer-image/regroup/protocol /regroup/lib/regroup/protocol
COPY operator/regroup_operator /regroup/lib/regroup_operator
RUN python3 -m compileall -q /regroup/lib
USER 65532:65532
ENTRYPOINT ["python", "-m", "regroup_operator"]
