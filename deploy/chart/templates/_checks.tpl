{{- /* What values.schema.json cannot say. Renders nothing. */}}
{{- define "diptych.checks" -}}
{{- $root := . }}
{{- if and .Values.models (or .Values.model.path (empty .Values.model.claim)) }}
{{- fail "models: model.claim has all of them, and model.path is of a single one" }}
{{- end }}
{{- $names := list }}
{{- range .Values.models }}{{ $names = append $names .name }}{{ end }}
{{- if ne (len $names) (len (uniq $names)) }}
{{- fail "models: each needs a name of its own" }}
{{- end }}
{{- range $shares := .Values.aliases }}
{{- range $model, $weight := $shares }}
{{- if not (has $model $names) }}{{ fail (printf "aliases: %s is none of models" $model) }}{{ end }}
{{- end }}
{{- end }}
{{- range $group := include "diptych.workers" . | fromJsonArray }}
{{- $role := $group.role }}
{{- if and $root.Values.internalTls.gateway (empty (index $root.Values.internalTls $role)) }}
{{- fail (printf "internalTls.%s: links of all programs have TLS, or none" $role) }}
{{- end }}
{{- if lt (int $group.processes) (int $group.hosts) }}
{{- fail (printf "%s.hosts: %d pods have %d processes (tensorParallel, pipelineParallel)" $role (int $group.hosts) (int $group.processes)) }}
{{- end }}
{{- if and $group.values.gpus (gt (int $group.processes) 1) }}
{{- fail (printf "%s.gpus: a worker of several processes computes on CPUs" $role) }}
{{- end }}
{{- if and (gt (int $group.hosts) 1) (index $root.Values.internalTls $role) (not (index $root.Values.environment "DIPTYCH_INSECURE_KV_NETWORK")) }}
{{- fail (printf "%s.hosts: what the pods of a group exchange has no TLS: environment.DIPTYCH_INSECURE_KV_NETWORK allows it beside internalTls" $role) }}
{{- end }}
{{- end }}
{{- end }}
