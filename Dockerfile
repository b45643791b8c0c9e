# zmqtrain in a container: docker build -t registry.example/zmqtrain:0.1.0 .
#
#   docker run --rm zmqtrain:0.1.0 version
#   docker run --rm --network host --shm-size 1g -v "$PWD:/workspace" -e ZMQTRAIN_COORDINATOR -e ZMQTRAIN_TOKEN zmqtrain:0.1.0
#
# Without arguments it is an agent, which takes part in a run (docs/clusters.md, "Any scheduler"). Tasks are expected in /workspace: mount
# a folder, or build an image FROM this one that has them. For GPUs build with --build-arg TORCH_INDEX=https://pypi.org/simple.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY zmqtrain zmqtrain
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
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
