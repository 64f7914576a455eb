"""Error messages of scripts, libraries and files: devices, values, FSDP, checkpoints, versions, timeouts."""

from accel_fsdp.launch.doctor.rows import KnownError

HANGING = "accel-fsdp rehearse FILE runs the job in small and says where each rank waits; training: --hang_timeout"
SYNCHRONOUS = "CUDA_LAUNCH_BLOCKING=1 shows the operation"

SCRIPT_ERRORS = {
    "cuda-before-fork": KnownError(
        r"Cannot re-initialize CUDA in forked subprocess",
        "a process was forked from one that had used CUDA: by an import or an earlier cell of a notebook; "
        "or a worker of the data loader uses the GPU",
        "restart the notebook, no GPU before notebook_launcher; data sets on the CPU; multiprocessing with spawn",
        ("huggingface/accelerate#940",),
    ),
    "mixed-dtypes": KnownError(
        r"uniform dtype(?! but got[^\n]*\bu?int8)|uniform original parameter dtype"
        r"|all (parameters|tensors) to have (the )?same dtype",
        "one FSDP unit holds parameters of several dtypes, as LoRA in float32 on a base in bfloat16",
        "load the model and the adapter in one dtype; FSDP's mixed_precision computes in bfloat16 anyway",
    ),
    "integer-weights": KnownError(
        r"Cannot flatten integer dtype|uniform dtype but got[^\n]*\bu?int8"
        r"|shapes cannot be multiplied \(\S+ and (1x\d{5,}|\d{5,}x1|0x0)\)",
        "a layer computes with 4-bit or 8-bit weights as they are stored: FSDP sharded them without their scales, "
        "the model was moved or copied after it was loaded, or peft or bitsandbytes is too old",
        "bnb_4bit_quant_storage: the dtype of the model (bfloat16); 8-bit weights can't be sharded; newer peft",
    ),
    "mixed-requires-grad": KnownError(
        r"uniform `?requires_grad",
        "one FSDP1 unit holds frozen and trained parameters, as LoRA makes them",
        "fsdp_use_orig_params: true; or fsdp_version: 2",
        ("huggingface/peft#1702", "pytorch/pytorch#104690"),
    ),
    "wrong-layer-class": KnownError(
        r"Could not find the transformer layer class",
        "fsdp_transformer_layer_cls_to_wrap, or the model's own list of layers, names a class that this model lacks; "
        "the YAML may be that of another project",
        "accel-fsdp check FILE --model MODEL names the classes; "
        "rm ~/.cache/huggingface/accelerate/default_config.yaml if it is an old one",
        ("tatsu-lab/stanford_alpaca#58", "axolotl-ai-cloud/axolotl#394", "huggingface/transformers#37672"),
    ),
    "fp16-weights": KnownError(
        r"unscale FP16 gradients",
        "trained weights are float16, and gradient scaling needs them in float32",
        "load the model in float32 and train with mixed_precision: fp16; or mixed_precision: bf16",
        ("yk7333/d3po#6",),
    ),
    "unused-parameters": KnownError(
        r"Expected to have finished reduction in the prior iteration",
        "parameters took no part in the loss: a branch that wasn't taken, or a layer whose output isn't used",
        "find_unused_parameters=True (ddp_find_unused_parameters); freeze what isn't used",
    ),
    "no-process-group": KnownError(
        r"Default process group has not been initialized|find 'RANK' in the torch environment"
        r"|environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
        "the script was started by python alone, or uses torch.distributed before its process group is there",
        "accel-fsdp launch FILE SCRIPT; create Accelerator() or call init_process_group first",
    ),
    "mesh-without-shards": KnownError(
        r"Invalid mesh_dim_names",
        "FSDP2 on a mesh with no dimension to shard over",
        "parallelism_config_dp_shard_size: 2 or more; accel-fsdp check FILE",
        ("huggingface/accelerate#3798",),
    ),
    "no-cpu-backend": KnownError(
        r"No backend type associated with device type cpu|A CPU backend must be enabled",
        "the process group has NCCL alone, and offload or an asynchronous save needs collectives on the CPU",
        "backend cpu:gloo,cuda:nccl; train/sft.py makes it so",
        ("huggingface/accelerate#3574", "pytorch/pytorch#148532"),
    ),
    "bf16-unsupported": KnownError(
        r"Your setup doesn't support bf16|Bfloat16 is only supported on GPUs with compute capability",
        "bfloat16 was asked for, and this GPU is older than Ampere (V100, T4, RTX 20), or torch sees none",
        "mixed_precision: fp16, and no --bf16, on these GPUs; nvidia-smi, where the GPU is newer",
        ("lm-sys/FastChat#399", "databrickslabs/dolly#11"),
    ),
    "no-sync-under-zero": KnownError(
        r"no.sync context manager is incompatible with gradient ?partitioning",
        "gradient accumulation enters no_sync, which DeepSpeed 0.16 and newer refuse under ZeRO-2 and ZeRO-3",
        "pip install -U accelerate transformers; or an accumulation of 1",
        ("deepspeedai/DeepSpeed#6793", "yuanzhoulvpi2017/zero_nlp#204"),
    ),
    "local-rank-argument": KnownError(
        r"unrecognized arguments: --local[-_]rank",
        "torch.distributed.launch of torch 2 gives the script --local-rank, which its parser doesn't know",
        "torchrun or accelerate launch, and LOCAL_RANK from the environment; or both spellings in the parser",
        ("sail-sg/metaformer#12", "OFA-Sys/Chinese-CLIP#74"),
    ),
    "empty-weights": KnownError(
        r"param with shape torch\.Size\(\[0\]\) from checkpoint",
        "the file holds empty tensors: it was saved under ZeRO-3 or FSDP without gathering the shards",
        "export the sharded checkpoint of that run: accel-fsdp export, or zero_to_fp32.py; later runs save with "
        "stage3_gather_16bit_weights_on_model_save: true",
        ("axolotl-ai-cloud/axolotl#933", "huggingface/transformers#20082"),
    ),
    "cuda-versions": KnownError(
        r"CUDAMismatchException|Installed CUDA version \S+ does not match the version torch was compiled with",
        "nvcc on this machine is of another CUDA than torch was built with, so no extension can be compiled",
        "a torch for that CUDA, or CUDA_HOME at one that fits: python -c 'import torch; print(torch.version.cuda)'",
        ("JIA-Lab-research/MGM#91", "deepspeedai/DeepSpeed#1077"),
    ),
    "wrapped-names": KnownError(
        r"Unexpected key(\(s\))?[^\n]* \"(module|_orig_mod|_fsdp_wrapped_module)\.",
        "the weights were saved from a wrapped or compiled model, whose names have a prefix",
        "accel-fsdp export takes the prefix off; or save accelerator.unwrap_model(model)",
        ("aks2203/deep-thinking#5", "AlmondGod/tinyworlds#13"),
    ),
    "no-nccl": KnownError(
        r"Distributed package doesn't have NCCL built in",
        "this torch has no NCCL: Windows, macOS, or a build for the CPU",
        "Linux or WSL for several GPUs; backend gloo on one; pip install torch for CUDA",
        ("fishaudio/fish-diffusion#2",),
    ),
    "optimizer-groups": KnownError(
        r"parameter group that doesn't match the size of optimizer's group"
        r"|loaded state dict has a different number of parameter groups",
        "other parameters are trained than when the optimizer was saved: another model or adapter, layers frozen or "
        "not, or other groups for weight decay",
        "resume with the settings of the save; or load the weights alone, with a new optimizer",
        ("facebookresearch/GloRe#8", "IntelLabs/distiller#525"),
    ),
    "weights-only": KnownError(
        r"Weights only load failed",
        "since torch 2.6 torch.load reads tensors alone, and this file holds other objects too, as the random state "
        "of an old run or arguments of a script",
        "newer transformers; torch.serialization.add_safe_globals for the class that it names; "
        "weights_only=False for files that you trust",
        ("NVIDIA/Isaac-GR00T#300",),
    ),
    "tied-weights": KnownError(
        r"Some tensors share memory, this will lead to duplicate memory on disk",
        "the model's tied weights are in the state dict twice, and safetensors stores no tensor twice",
        "model.save_pretrained or safetensors.torch.save_model, which know of ties; or a newer transformers",
        ("hiyouga/LlamaFactory#10137",),
    ),
    "slow-preparation": KnownError(
        r"(?s:\b(Running tokenizer|Tokenizing|Filter|Map)\b[^\n]*\d+%\|.{0,9999}?"
        r"(collective operation timeout|timed out after|Socket Timeout|Timeout waiting for key|waitForInput))",
        "one rank prepares the rows while the others wait for it, for longer than a collective may take",
        "--ddp_timeout 7200; or prepare the rows before the job",
        ("hiyouga/LlamaFactory#2424",),
    ),
    "wrapped-attribute": KnownError(
        r"'(DistributedDataParallel|DataParallel|FullyShardedDataParallel|DeepSpeedEngine)' object has no attribute '",
        "the script asks the wrapper for what the model in it has, or a library unwrapped once too often or too seldom",
        "accelerator.unwrap_model(model), or model.module; forward passes still go through the wrapper",
        ("Project-MONAI/GenerativeModels#354", "SeanNaren/deepspeech.pytorch#475"),
        means="the wrapper of a model doesn't have an attribute that is asked of it",
    ),
    "loss-scale": KnownError(
        r"Current loss scale already at minimum",
        "the model was trained in bfloat16, the learning rate is too high, or rows are faulty",
        "mixed_precision: bf16 in place of fp16; look at the loss and the norm of the first steps",
        ("microsoft/LMOps#280",),
        means="step after step overflowed in float16, also with the smallest loss scale",
    ),
    "in-place": KnownError(
        r"needed for gradient computation has been modified by an inplace operation",
        "DDP sends buffers of batch norm between two forward passes of one step; or the model's own code does it",
        "broadcast_buffers=False; SyncBatchNorm; one forward pass in a step; torch.autograd.set_detect_anomaly(True) "
        "shows the operation",
        ("XPixelGroup/BasicSR#541", "Little-Podi/AiATrack#7"),
        means="a tensor that backward needs was overwritten after the forward pass",
    ),
    "no-launcher": KnownError(
        r"KeyError: '(LOCAL_RANK|RANK|WORLD_SIZE|MASTER_ADDR)'",
        "it was started by python alone, or by a launcher that sets other variables, as srun does",
        "accel-fsdp launch FILE SCRIPT, or torchrun",
        ("Theodore-PKU/MC-DDPM#1", "OpenBMB/BMTrain#19"),
        means="the script expects variables that a launcher sets, and they aren't set",
    ),
    "invalid-values": KnownError(
        r"probability tensor contains|Assertion `[^\n]*(input_val|<= one|<= 1)\b",
        "float16 overflowed where the model needs bfloat16, weights or a quantised kernel are faulty, "
        "or a row is padding alone",
        f"look at the loss and the norm of the steps before; mixed_precision: bf16 in place of fp16; {SYNCHRONOUS}",
        means="values are NaN, infinite or out of range",
    ),
    "index-out-of-range": KnownError(
        r"device-side assert triggered|Assertion `[^`\n]*(srcSelectDimSize|n_classes)",
        "a token beyond the embedding, a label beyond the classes, "
        "or a position beyond the model's; with several GPUs, broken P2P; where no line names the assertion, "
        "it can be a value: NaN, or beyond 0 to 1 in a loss",
        f"compare len(tokenizer) with the rows of the embedding; {SYNCHRONOUS}",
        means="an assertion in a kernel failed, mostly that an index is in range",
    ),
    "illegal-access": KnownError(
        r"illegal memory access was encountered|an illegal instruction was encountered",
        "a kernel of an extension (attention, quantisation, Liger) or of a version of torch or CUDA, a tensor on "
        "another GPU, an index out of range, or a failing GPU",
        f"{SYNCHRONOUS}; compute-sanitizer; turn extensions off one by one",
        means="a kernel did what it must not, as reading outside of its memory; the line of the error is not the place",
    ),
    "cublas-memory": KnownError(
        r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_NOT_INITIALIZED",
        "the GPU's memory is full when it asks for its own; an index out of range broke CUDA before; "
        "or it doesn't fit the driver",
        f"a smaller batch tells which; accel-fsdp plan --config FILE says what fits; {SYNCHRONOUS}",
        means="cuBLAS or cuDNN couldn't start on this GPU",
    ),
    "two-devices": KnownError(
        r"Expected all tensors to be on the same device|module must have its parameters and buffers on device cuda",
        "device_map spread the model over the GPUs, or put it on one GPU for all processes; the script was started by "
        "python alone and sees several GPUs; or a second model or a tensor wasn't moved",
        "accelerate launch, and no device_map (or {'': local process index}); one process with device_map='auto' alone",
        means="one operation met tensors of two devices",
    ),
    "meta-weights": KnownError(
        r"Cannot copy out of meta tensor",
        "rank 0 alone loaded them (cpu_ram_efficient_loading, low_cpu_mem_usage) and didn't send them, device_map left "
        "them elsewhere, or the checkpoint lacks them",
        "fsdp_sync_module_states: true beside fsdp_cpu_ram_efficient_loading, or both false; "
        "start with accelerate launch, and load the model after the process group is there",
        ("hiyouga/LlamaFactory#2940", "huggingface/accelerate#2031"),
        means="weights have no values yet on this rank",
    ),
    "sharded-shapes": KnownError(
        r"size mismatch for [^\n]*flat_param|_flat_param[^\n]*(size|shape)s? mismatch"
        r"|shape in current model is torch\.Size\(\[0\]\)|used a DP world size of \d+ but the current world size is",
        "it was saved by another number of ranks, with other units, or as LOCAL_STATE_DICT; or whole weights meet a "
        "model that is already sharded",
        "the number of ranks and the wrap classes of the save; fsdp_state_dict_type: SHARDED_STATE_DICT for later "
        "ones; for ZeRO zero_to_fp32.py, without the optimizer",
        means="a checkpoint and the shards of this job don't fit together",
    ),
    "missing-key": KnownError(
        r"Missing key in checkpoint state_dict",
        "another model or adapter, no optimizer state, or other versions of accelerate and torch",
        "accel-fsdp checkpoints FOLDER says what it lacks; for optimizer.state.0.step: accelerate >= 1.13",
        ("huggingface/accelerate#3971", "pytorch/pytorch#148252"),
        means="the checkpoint doesn't hold what the job asks for",
    ),
    "broken-file": KnownError(
        r"PytorchStreamReader failed|Error while deserializing header|UnpicklingError: invalid load key"
        r"|EOFError: Ran out of input",
        "a download or copy was interrupted, git clone without git lfs left a pointer, the disk was full when it was "
        "written, its name says another format, its header is beyond safetensors' limit, or it was published so",
        "ls -l it, and compare its size and sha256 with the source's; delete it, and fetch it again",
        means="a file of weights isn't whole, or isn't of the format that its reader expects",
    ),
    "embedding-in-a-unit": KnownError(
        r"Invariant encountered: value was None when it should not be",
        "Accelerate makes a unit of the model's input embedding under FSDP2, and a layer class such as ViTEmbeddings "
        "holds it already",
        "accel-fsdp check FILE --model MODEL names the class; leave it out of fsdp_transformer_layer_cls_to_wrap",
        means="fully_shard was called for a module inside of one that is sharded",
    ),
    "no-input-embedding": KnownError(
        r"get_input_embeddings` not auto.handled",
        "the model names no input embedding, of which Accelerate makes a unit under FSDP2: CLIP, Wav2Vec2, ConvNeXt",
        "fsdp_version: 1, or another engine; in a model of your own, define get_input_embeddings",
    ),
    "shared-between-units": KnownError(
        r"is shared with a parameter already managed by another FSDP group",
        "input embedding and head are units of their own under Accelerate, and their weights are also in other "
        "modules, as in T5, BART and BERT; or layer classes that share a weight",
        "fsdp_version: 1; in a script of your own fully_shard([module_a, module_b]) as one unit",
    ),
    "twice-ready": KnownError(
        r"Expected to mark a variable ready only once",
        "DDP and gradient checkpointing in its reentrant form, or one parameter that several backward passes of a step "
        "reach",
        "use_reentrant: false in gradient_checkpointing_kwargs; ddp_find_unused_parameters: false; or static_graph",
    ),
    "recomputed-otherwise": KnownError(
        r"Recomputed values for the following tensors have different metadata",
        "a cache that grew, another dtype under autocast, parameters that are shards by then",
        "use_cache: false in the model's config; checkpointing around FSDP's units, or fsdp_activation_checkpointing",
        means="a checkpointed layer saved other tensors when it ran again",
    ),
    "flash-attention-dtype": KnownError(
        r"FlashAttention only supports? fp16 and bf16",
        "the layers compute in float32: no mixed precision, or the model was cast or loaded so",
        "mixed_precision: bf16, and load the model in bfloat16 where attention runs outside of autocast",
    ),
    "outside-forward": KnownError(
        r"'weight' must be 2-D|setStorage[^\n]*out of bounds for storage of size 0|elements, but its data is not alloc",
        "generate, or a part of the model called by itself, outside of the forward pass of its FSDP unit, gradient "
        "checkpointing that runs parts of a unit again, or a library that doesn't know of shards",
        "call the wrapped model; FSDP.summon_full_params or model.unshard() around generate, on all ranks; "
        "fsdp_activation_checkpointing: true in place of the model's own, or use_reentrant: false",
        ("huggingface/transformers#32285", "pytorch/pytorch#124019"),
        means="a module was used while its parameters weren't whole",
    ),
    "mixed-tensors": KnownError(
        r"got mixed torch\.Tensor and DTensor",
        "a part of the model called past FSDP's hooks (generate, its forward, a validation), parameters or buffers in "
        "no unit beside those that are sharded, as in clipping, or inputs that must be DTensors too",
        "call the wrapped model; model.unshard() around generate, on all ranks; fully_shard the root too",
        ("huggingface/trl#4550",),
        means="one operation met sharded and plain tensors",
    ),
    "no-gradient": KnownError(
        r"none of output has requires_grad=True, this checkpoint|element \d of \w+ does not require grad"
        r"|One of the differentiated Tensors does not require grad",
        "reentrant activation checkpointing over frozen inputs (LoRA), target modules that match nothing, or detach or "
        "no_grad on the way",
        "gradient_checkpointing_kwargs: use_reentrant false; or model.enable_input_require_grads()",
        ("cloneofsimo/lora#253",),
        means="what is to be differentiated depends on no parameter that is trained",
    ),
    "collective-timeout": KnownError(
        r"collective operation timeout|Timed out waiting \d+ms for (recv|send) operation|monitoredBarrier"
        r"|watchdog got stuck|Timeout at NCCL work|Detected mismatch between collectives on ranks"
        r"|WorkNCCL.*ran for \d+ milliseconds before timing out",
        "one rank skipped a collective, took another branch, evaluates or saves for long, waits for data, or has "
        "stopped; or links between GPUs or machines hang",
        f"{HANGING}; NCCL_P2P_DISABLE=1 shows whether it is the links",
        ("huggingface/accelerate#3250", "konstmish/prodigy#35"),
        means="ranks didn't meet at a collective",
        follows=True,
    ),
    "missing-ranks": KnownError(
        r"wait timeout after \d+ms, keys|\d+/\d+ clients joined|store->get\([^\n]* got error[^\n]*Time-?out"
        r"|waitForInput: [^\n]*timed out after \d+ms",
        "it ended before, prepares or loads for long, doesn't reach machine 0, has no interface besides lo, or was "
        "given another world size",
        "look for the first error in the logs of all machines; accel-fsdp doctor on each says who is missing",
        means="a rank waited in vain for another to come to this point",
        follows=True,
    ),
    "device-unknown": KnownError(
        r"devices? used by this process (is|are) currently unknown",
        "the process group was made without device_id, so a barrier guesses the GPU and may hang",
        "init_process_group(device_id=torch.device('cuda', local_rank)); accelerate launch does so",
        ("huggingface/trl#3994",),
        means="torch doesn't know which GPU this rank uses",
    ),
    "library-versions": KnownError(
        r"^[^\n]*(TypeError: |\w\.__init__\(\))[^\n]*got an unexpected keyword argument|^[^\n]*cannot import name '",
        "a library is newer or older than the code that uses it, and what it asks for was renamed, moved or isn't "
        "there yet; after an upgrade of one package, another is left behind",
        "pip list, and the versions that the script or its project asks for; the release notes of that library",
        means="code asks for an argument or a name that what is installed doesn't have",
    ),
}
