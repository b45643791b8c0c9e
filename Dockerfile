# zmqtrain in a container: docker build -t registry.example/zmqtrain:0.1.0 .
#
#   docker run --rm zmqtrain:0.1.0 version
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/workspace" zmqtrain:0.1.0 launch FILE
#   docker run --rm --network host -v "$PWD:/workspace" -e ZMQTRAIN_COORDINATOR -e ZMQTRAIN_TOKEN zmqtrain:0.1.0
#
# Without arguments it is an agent, which takes part in a run (docs/clusters.md, "Containers"). Tasks are expected in /workspace: mount a
# folder, or build an image FROM this one that has them. Build arguments:
#
#   PYTHON         the version of Python; machines of one run need the same
#   TORCH_INDEX    where torch comes from: https://pypi.org/simple for GPUs
#   PIP_INDEX_URL  a mirror for everything else, where PyPI cannot be reached
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
ARG PIP_INDEX_URL
ARG PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY zmqtrain zmqtrain
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ARG PIP_ROOT_USER_ACTION=ignore
COPY --from=wheel /wheels /wheels
# numpy comes with zmqtrain; torch first, in the build that was asked for.
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch>=2.13" \
    && pip install --no-cache-dir /wheels/*.whl \
    && rm -r /wheels \
    && useradd --create-home --uid 1000 zmqtrain \
    && install -d -o zmqtrain -g zmqtrain /workspace
USER zmqtrain
WORKDIR /workspace
# Bytecode was written when packages were installed; logs shall appear at once.
ENV PYTHONUNBUFFERED=1
# Agents pass a signal on to their roles, and give them time: 30 s, or what docker stop --time says.
STOPSIGNAL SIGTERM
ENTRYPOINT ["zmqtrain"]
CMD ["agent"]
